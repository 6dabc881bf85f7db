"""Converts trajectories to the containers of torchrl's language models, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import NonTensorData, TensorDict, TensorDictBase, lazy_stack
from torch import Tensor
from torchrl.modules.llm.policies import LogProbs, Masks, Tokens

from grpo_components.trajectory import Trajectory

OURS = "trajectory"
"""Key of the fields that torchrl has no place for; with them, the way back loses nothing."""
_REFERENCE = ("next", "ref_log_probs", "full")


def to_tensordict(
    trajectories: Sequence[Trajectory],
    advantages: Sequence[NDArray[np.float32]] | None = None,
    pad_id: int = 0,
) -> TensorDict:
    """Return a batch as torchrl's losses read it: padded, `full` on the left, with masks.

    A token without a logprob of the generator (of the prompt, padding, or the environment) has
    NaN: torchrl's losses leave such tokens out, whatever their masking strategy is.

    Args:
        trajectories: S responses with their prompts.
        advantages: S arrays [R], a number per token; None for each trajectory's own advantage.
        pad_id: token id of the padding.

    Returns:
        Of batch size [S], with T the longest prompt with its response: `tokens` (prompt, response,
        full), `masks` (attention; assistant: tokens of the policy), `log_probs` (response, full),
        `advantage` [S, T, 1], `next` (reward [S, 1], done, and `ref_log_probs` if there are any),
        and `trajectory` with all other fields.
    """
    size, every = len(trajectories), list(trajectories)
    prompts, responses = [t.prompt_ids for t in every], [t.response_ids for t in every]
    if advantages is None:
        advantages = [np.full(len(t.response_ids), t.advantage, np.float32) for t in every]
    wholes = [np.concatenate(parts) for parts in zip(prompts, responses, strict=True)]
    sampled = [_beside_prompt(t, t.response_mask, False) for t in every]
    logprobs = [np.where(t.response_mask, t.generator_logprobs, np.nan) for t in every]
    full_logprobs = [_beside_prompt(t, own, np.nan) for t, own in zip(every, logprobs, strict=True)]
    of_tokens = [_beside_prompt(t, own, 0.0) for t, own in zip(every, advantages, strict=True)]
    batch = TensorDict(
        tokens=Tokens(
            prompt=_padded(prompts, pad_id),
            response=_padded(responses, pad_id, left=False),
            full=_padded(wholes, pad_id),
            padded=True,
            batch_size=[size],
        ),
        masks=Masks(
            all_attention_mask=_padded([np.ones(len(w), bool) for w in wholes], False),
            all_assistant_mask=_padded(sampled, False),
            padded=True,
            batch_size=[size],
        ),
        log_probs=LogProbs(
            response=_padded(logprobs, np.nan, left=False),
            full=_padded(full_logprobs, np.nan),
            padded=True,
            batch_size=[size],
        ),
        advantage=_padded(of_tokens, 0.0).unsqueeze(-1),
        next=_after(every),
        batch_size=[size],
    )
    batch[OURS] = lazy_stack([_own_fields(t) for t in every], 0)
    return batch


def _after(trajectories: Sequence[Trajectory]) -> TensorDict:
    """Return what torchrl keeps under `next`: rewards, and the reference's logprobs if known."""
    size = len(trajectories)
    after = TensorDict(
        reward=torch.tensor([[t.reward] for t in trajectories], dtype=torch.float32),
        done=torch.ones(size, 1, dtype=torch.bool),
        batch_size=[size],
    )
    if not any(t.reference_logprobs is None for t in trajectories):
        own = [_beside_prompt(t, t.reference_logprobs, 0.0) for t in trajectories]
        after["ref_log_probs", "full"] = _padded(own, 0.0)
    return after


def from_tensordict(
    batch: TensorDictBase, *, policy_version: int = 0, temperature: float = 1.0
) -> list[Trajectory]:
    """Return the trajectories of a batch, from `to_tensordict` or from torchrl.

    Args:
        batch: of batch size [S], with `tokens` (prompt, response), padded or ragged; `log_probs`
            (response); optionally `masks` (attention, assistant), `advantage` and `next` (reward,
            ref_log_probs). Without an assistant mask, the policy sampled the whole response.
        policy_version: version that sampled the tokens of a batch that torchrl made.
        temperature: temperature at which they were sampled.

    Raises:
        ValueError: a key is missing, or a padded batch has no attention mask.
    """
    for key in (("tokens", "prompt"), ("tokens", "response"), ("log_probs", "response")):
        if key not in batch.keys(include_nested=True):
            raise ValueError(f"batch: no {'.'.join(key)}; allowed: one with tokens and log_probs")
    return [
        _one(row, number, policy_version, temperature) for number, row in enumerate(batch.unbind(0))
    ]


def _one(row: Any, number: int, policy_version: int, temperature: float) -> Trajectory:
    if OURS in row:
        return _ours(row)
    prompt, response = row["tokens", "prompt"], row["tokens", "response"]
    attention, assistant = row.get(("masks", "all_attention_mask")), None
    if attention is not None:
        whole = row["tokens", "full"][attention.bool()]
        logprobs = row["log_probs", "response"]
        if row.get(("masks", "all_assistant_mask")) is not None:
            assistant = row["masks", "all_assistant_mask"][attention.bool()].bool()
        # Both paddings are known from the mask of the whole: the prompt's is on its left.
        length = len(whole) - _response_length(whole, prompt, response)
        prompt, response = whole[:length], whole[length:]
        assistant = None if assistant is None else assistant[length:]
        logprobs = logprobs[: len(response)]
    elif row["tokens"].padded:
        raise ValueError("batch: padded, and without masks.all_attention_mask; allowed: with it")
    else:
        logprobs = row["log_probs", "response"]
    mask = np.ones(len(response), bool) if assistant is None else assistant.numpy()
    reference = row.get(_REFERENCE)
    trajectory = Trajectory(
        prompt_ids=prompt.numpy().astype(np.int64),
        response_ids=response.numpy().astype(np.int64),
        response_mask=mask,
        generator_logprobs=np.where(mask, logprobs.numpy(), 0.0).astype(np.float32),
        token_versions=np.where(mask, policy_version, -1).astype(np.int32),
        prompt_index=number,
        epoch=0,
        group_id=number,
        attempt=0,
        finish_reason="stop",
        temperature=temperature,
        reward=float(row.get(("next", "reward"), torch.tensor(torch.nan)).sum()),
        reference_logprobs=None
        if reference is None
        else reference[len(reference) - len(response) :].numpy(),
    )
    trajectory.check()
    return trajectory


def _response_length(whole: Tensor, prompt: Tensor, response: Tensor) -> int:
    """Return how many of the last tokens of the whole are the response, both parts padded."""
    for length in range(min(len(whole), len(response)), -1, -1):
        left = len(whole) - length
        fits = left <= len(prompt) and torch.equal(whole[left:], response[:length])
        if fits and torch.equal(whole[:left], prompt[len(prompt) - left :]):
            return length
    raise ValueError("batch: tokens.full is not tokens.prompt with tokens.response after it")


def _own_fields(trajectory: Trajectory) -> TensorDict:
    """Return the fields of a trajectory as they are, without padding."""
    values = {}
    for field in fields(trajectory):
        value = getattr(trajectory, field.name)
        is_array = isinstance(value, np.ndarray)
        values[field.name] = torch.from_numpy(value.copy()) if is_array else NonTensorData(value)
    return TensorDict(values)


def _ours(row: Any) -> Trajectory:
    values = {}
    for field in fields(Trajectory):
        value = row[OURS][field.name]
        values[field.name] = value.numpy() if isinstance(value, Tensor) else value
    return Trajectory(**values)


def _beside_prompt(trajectory: Trajectory, values: Any, fill: Any) -> NDArray[Any]:
    """Return values [P + R] that begin with `fill` for each token of the prompt."""
    values = np.asarray(values)
    return np.concatenate([np.full(len(trajectory.prompt_ids), fill, values.dtype), values])


def _padded(rows: Sequence[NDArray[Any]], fill: Any, *, left: bool = True) -> Tensor:
    """Return rows of several lengths as one tensor [S, longest]."""
    width = max(map(len, rows), default=0)
    padded = np.full((len(rows), width), fill, rows[0].dtype if rows else np.int64)
    for target, row in zip(padded, rows, strict=True):
        target[width - len(row) if left else 0 : width if left else len(row)] = row
    return torch.from_numpy(padded)
