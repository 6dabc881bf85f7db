"""Rung of the equivalence ladder that compares our loss with torchrl's, on the same batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from lib.loss_inputs import loss_inputs
from lib.trainer_ranks import full_logprobs
from numpy.typing import NDArray
from torch import Tensor, nn

from equivalence.ladder import Bench, gradients, max_difference, rung
from equivalence.update_rungs import ragged_batch, whole_model
from grpo_components.objective.aggregation import SequenceMean, TokenMean
from grpo_components.objective.losses import GRPOLoss, LossInputs
from grpo_components.trajectory import Trajectory

_CLIPS = ((0.2, 0.2), (0.05, 0.1))
"""Pairs of clip_low and clip_high."""
_AGGREGATIONS = ((TokenMean(), "token_mean"), (SequenceMean(), "prompt_mean"))
"""Ours, and torchrl's of the same meaning."""


@rung(
    "torchrl's `GRPOLoss` = our loss",
    "loss, and gradient relative to the largest, in float64: the tiny policy on ragged "
    "responses with environment tokens, as a padded batch of torchrl's containers with both of "
    "its masks; two pairs of clip bounds; `token_mean` = `TokenMean`, `prompt_mean` = "
    "`SequenceMean`",
    1e-6,
)
def torchrl_loss_is_ours(bench: Bench) -> float:
    """Ours gets the trained tokens, torchrl's all of the response, or the policy's tokens."""
    # Importing them takes seconds, and no other rung needs them.
    from torchrl.objectives.llm import GRPOLoss as TheirGRPOLoss

    records, advantages = ragged_batch(bench)
    batch = _padded_batch(records, advantages)
    model = whole_model(bench).double().requires_grad_(True)
    worst = 0.0
    for low, high in _CLIPS:
        for aggregation, name in _AGGREGATIONS:
            logits, tokens = _left_padded_logits(model, records), _tokens(records, advantages)
            weights = aggregation(np.array([int(r.response_mask.sum()) for r in records]))
            own = [full_logprobs(model, r)[torch.from_numpy(r.response_mask)] for r in records]
            inputs = replace(tokens, trainer_logprobs=torch.cat(own))
            each = torch.from_numpy(weights)[tokens.sequence_ids]
            expected = (GRPOLoss(low, high)(inputs)[0] * each).sum()
            for strategy in ("sft", "rlhf"):
                loss = TheirGRPOLoss(
                    _Actor(logits, records),  # pyright: ignore -- has what the loss reads
                    clip_epsilon=(low, high),
                    aggregation=name,
                    entropy_bonus=False,
                    masking_strategy=strategy,
                )
                found = loss(batch).loss_objective.sum()
                worst = max(worst, _difference(model, expected, found))
    return worst


def _padded_batch(records: Sequence[Trajectory], advantages: NDArray[np.float32]) -> Any:
    """Return a batch as torchrl's losses read it: padded on the left.

    What the policy did not sample has a logprob of NaN, so that each masking leaves it out.
    """
    from tensordict import TensorDict

    def padded(values: Sequence[Any], fill: Any) -> Tensor:
        rows = [torch.from_numpy(np.asarray(row)).flip(0) for row in values]
        return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill).flip(1)

    prompts = [len(record.prompt_ids) for record in records]
    ids = [np.concatenate([record.prompt_ids, record.response_ids]) for record in records]
    sampled = [
        np.concatenate([np.zeros(prompt, bool), record.response_mask])
        for prompt, record in zip(prompts, records, strict=True)
    ]
    logprobs = [
        np.where(mask, np.concatenate([np.zeros(prompt), record.generator_logprobs]), np.nan)
        for prompt, mask, record in zip(prompts, sampled, records, strict=True)
    ]
    of_tokens = [
        np.where(np.arange(len(whole)) < prompt, 0.0, advantage)
        for whole, prompt, advantage in zip(ids, prompts, advantages, strict=True)
    ]
    size = [len(records)]
    return TensorDict(
        tokens=TensorDict(full=padded(ids, 0), batch_size=size),
        masks=TensorDict(
            all_attention_mask=padded([np.ones(len(whole), bool) for whole in ids], False),
            all_assistant_mask=padded(sampled, False),
            batch_size=size,
        ),
        log_probs=TensorDict(full=padded(logprobs, np.nan).float(), batch_size=size),
        advantage=padded(of_tokens, 0.0).float().unsqueeze(-1),
        batch_size=size,
    )


class _Actor(nn.Module):
    """What torchrl's loss reads of a policy: the distribution of the tokens of a batch."""

    def __init__(self, logits: Tensor, records: Sequence[Trajectory]) -> None:
        super().__init__()
        self._logits, self._records = logits, records

    def get_dist(self, batch: Any, **_: Any) -> Any:
        """Refuse: the loss asks for one of the two masks below."""
        raise NotImplementedError

    def _get_sft_dist(self, batch: Any) -> Any:
        ends = [len(record.response_ids) for record in self._records]
        width = batch["tokens", "full"].shape[-1]
        return self._dist(torch.arange(width) >= width - torch.tensor(ends)[:, None])

    def _get_rlhf_dist(self, batch: Any) -> Any:
        return self._dist(batch["masks", "all_assistant_mask"])

    def _dist(self, mask: Tensor) -> Any:
        from torchrl.modules.distributions import LLMMaskedCategorical

        return LLMMaskedCategorical(logits=self._logits, mask=mask)


def _left_padded_logits(model: nn.Module, records: Sequence[Trajectory]) -> Tensor:
    """Return logits [S, T, V], at each token those that predict it, over the temperature."""
    rows = []
    for record in records:
        ids = torch.from_numpy(np.concatenate([record.prompt_ids, record.response_ids]))
        logits = model(ids[None])[0] / record.temperature
        rows.append(torch.cat([torch.zeros_like(logits[:1]), logits[:-1]]))
    width = max(map(len, rows))
    return torch.stack([nn.functional.pad(row, (0, 0, width - len(row), 0)) for row in rows])


def _tokens(records: Sequence[Trajectory], advantages: NDArray[np.float32]) -> LossInputs:
    """Return the sampled tokens of a batch as our loss reads them, without trainer logprobs."""
    counts = torch.tensor([int(record.response_mask.sum()) for record in records])
    numbers = torch.repeat_interleave(torch.arange(len(records)), counts)
    generated = np.concatenate([r.generator_logprobs[r.response_mask] for r in records])
    own = torch.from_numpy(generated).double(), torch.from_numpy(advantages).double()[numbers]
    return loss_inputs(torch.empty(0), *own, ids=numbers)


def _difference(model: nn.Module, expected: Tensor, found: Tensor) -> float:
    """Return the difference of two losses, or of their gradients if that is larger."""
    before, after = (gradients(model, loss) for loss in (expected, found))
    largest = max(float(gradient.abs().max()) for gradient in before.values())
    return max(float((expected - found).abs()), max_difference(before, after) / largest)
