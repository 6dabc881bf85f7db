"""Computes logprobs of response tokens in chunks, so that full logits are never in memory."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torchtune.modules import RMSNorm

from grpo_components.errors import ConfigError
from grpo_components.models.hugging_face_policy import (
    base_of,
    is_transformers,
    logits_of,
    longest_sequence,
)
from grpo_components.models.shared_prompts import (
    CPU,
    Layout,
    Part,
    arrange,
    share_prompts,
    to_device,
)
from grpo_components.trajectory import TokenSequence, Trajectory


@dataclass(frozen=True)
class TokenBatch:
    """Input of a forward pass: prompts and responses, and the tokens whose logprobs are wanted."""

    tokens: Tensor
    """[N, 1] int64: token ids of all sequences; a shared prompt is there once."""
    input_pos: Tensor
    """[N, 1] int64: position of each token in its sequence."""
    layout: Layout
    """Which tokens see each other."""
    longest: int
    """Number of tokens in the longest sequence, as far as the pass reads it."""
    positions: Tensor
    """[M] int64: index of the token whose hidden state predicts each target."""
    targets: Tensor
    """[M] int64: ids of the tokens whose logprobs are wanted."""
    temperatures: Tensor
    """[M] float32: divisor of each token's logits, the same as in the generator."""


def parts_of(
    trajectories: Sequence[Trajectory | TokenSequence],
    masks: Sequence[NDArray[np.bool_]] | None = None,
) -> list[Part]:
    """Return how many tokens of each prompt and response to read for the wanted logprobs."""
    parts: list[Part] = []
    for number, t in enumerate(trajectories):
        last = len(t.response_ids) - 1
        if masks is not None:
            last = int(max(np.flatnonzero(masks[number]), default=0))
        parts.append(Part(t.prompt_ids.tobytes(), len(t.prompt_ids), max(last, 0)))
    return parts


def token_batch(
    trajectories: Sequence[Trajectory | TokenSequence],
    masks: Sequence[NDArray[np.bool_]] | None = None,
    *,
    device: torch.device = CPU,
) -> TokenBatch:
    """Lay out trajectories for one forward pass.

    `masks` say which response tokens need logprobs: [R] bool for each trajectory; None means all.
    """
    parts = parts_of(trajectories, masks)
    column = arrange(parts, device)
    tokens = np.empty(len(column.layout.positions), np.int64)
    positions, targets, temperatures = [], [], []
    for number, t in enumerate(trajectories):
        prompt, response = column.prompts[number], column.responses[number]
        tokens[prompt] = t.prompt_ids
        tokens[response] = t.response_ids[: len(response)]
        every = slice(None) if masks is None else masks[number]
        wanted = np.arange(len(t.response_ids))[every]
        predicts = np.concatenate([prompt[-1:], response])
        positions.append(predicts[wanted])
        targets.append(t.response_ids[wanted])
        temperatures.append(np.full(len(wanted), t.temperature, np.float32))
    wanted_arrays = map(np.concatenate, (positions, targets, temperatures))
    ids, *wanted_ids = to_device([tokens, *wanted_arrays], device)
    return TokenBatch(
        ids[:, None],
        column.layout.positions[:, None],
        column.layout,
        max(part.prompt_tokens + part.response_tokens for part in parts),
        *wanted_ids,
    )


def logprobs_and_entropies(
    logits: Tensor, targets: Tensor, temperatures: Tensor, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Return the targets' logprobs, and the entropies of the distributions that they come from."""
    logprobs = torch.log_softmax(logits.float() / temperatures[:, None], dim=-1)
    seen = logprobs if entropy_gradient else logprobs.detach()
    entropy = -(seen.exp() * seen).sum(dim=-1)
    return logprobs.gather(1, targets[:, None]).squeeze(1), entropy


def fuse_norms(model: nn.Module) -> None:
    """Make a torchtune decoder's norms use PyTorch's fused kernel on a GPU."""

    def forward(norm: Any, x: Tensor) -> Tensor:
        # torchtune casts x to float32, which excludes the kernel; it computes in float32 itself.
        return functional.rms_norm(x, norm.normalized_shape, norm.scale, norm.eps).to(x.dtype)

    for module in model.modules():
        if type(module) is RMSNorm:
            module.forward = types.MethodType(forward, module)


class ResponseLogprobs:
    """Makes a policy return logprobs of wanted tokens instead of logits.

    It replaces a torchtune decoder's method `unembed`, or a transformers model's `forward`, because
    the projection to the vocabulary must stay inside the model's forward pass, where FSDP has
    gathered the weights. It computes logits chunk by chunk, and again in the backward pass, so at
    most chunk_tokens x V logits are in memory. Attention computes a prompt once for its responses.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        chunk_tokens: int,
        num_ids: int | None = None,
        entropy_gradient: bool = False,
        compile_softmax: bool = False,
    ) -> None:
        self._model, self._limit = cast(Any, model), longest_sequence(model)
        self._batch: TokenBatch | None = None
        self._chunk, self._entropy_gradient = chunk_tokens, entropy_gradient
        self._num_ids = num_ids
        # One graph for all sizes, so that recomputation uses the same graph as the forward pass.
        self._softmax: Callable[..., tuple[Tensor, Tensor]] = (
            torch.compile(logprobs_and_entropies, dynamic=True)
            if compile_softmax
            else logprobs_and_entropies
        )
        if is_transformers(model):
            self._model.forward = types.MethodType(self._from_base, model)
        else:
            share_prompts(model)
            fuse_norms(model)
            self._model.unembed = types.MethodType(self._unembed, model)

    def __call__(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """Return logprobs [M] of the targets and entropies [M] of their distributions, in nats."""
        self._batch = batch
        if self._limit is not None and batch.longest > self._limit:
            problem = f"a sequence of {batch.longest} tokens given"
            raise ConfigError("model.max_seq_len", problem, f"at most {self._limit}")
        try:
            if is_transformers(self._model):
                return self._model(
                    input_ids=batch.tokens.T, position_ids=batch.input_pos.T, layout=batch.layout
                )
            return self._model(batch.tokens, mask=batch.layout, input_pos=batch.input_pos)
        finally:
            self._batch = None

    def _unembed(self, module: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self._project(module.norm(hidden).flatten(0, 1), module.output)

    def _from_base(self, module: Any, **column: Any) -> tuple[Tensor, Tensor]:
        assert self._batch is not None, "the model is only called through ResponseLogprobs"
        longest = self._batch.longest
        hidden = base_of(module)(**column, longest=longest, use_cache=False).last_hidden_state
        return self._project(hidden[0], partial(logits_of, module))

    def _project(
        self, hidden: Tensor, logits_of: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return logprobs and entropies [M] of the batch's targets, from all hidden states."""
        batch = self._batch
        assert batch is not None, "the decoder is only called through ResponseLogprobs"
        hidden = hidden.index_select(0, batch.positions)

        def project(chunk: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
            logits = logits_of(chunk)[:, : self._num_ids]
            return self._softmax(logits, targets, temperatures, self._entropy_gradient)

        def recomputed(*args: Tensor) -> tuple[Tensor, Tensor]:
            return checkpoint(project, *args, use_reentrant=False)  # pyright: ignore

        run = recomputed if torch.is_grad_enabled() else project
        columns = (hidden, batch.targets, batch.temperatures)
        chunks = zip(*(column.split(self._chunk) for column in columns), strict=True)
        logprobs, entropies = zip(*(run(*chunk) for chunk in chunks), strict=True)
        return torch.cat(logprobs), torch.cat(entropies)
