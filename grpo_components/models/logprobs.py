"""Computes logprobs of response tokens in chunks, so that `[B, T, V]` is never in memory."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from grpo_components.models.packing import document_mask, row_layout
from grpo_components.trajectory import TokenSequence, Trajectory


@dataclass(frozen=True)
class TokenBatch:
    """Input of a forward pass: sequences, padded or packed, and the tokens to give logprobs of."""

    tokens: Tensor
    """[B, T] int64; padding is on the right, where causal attention cannot see it."""
    positions: Tensor
    """[N] int64: index of the hidden state that predicts each target, in the flattened [B * T]."""
    targets: Tensor
    """[N] int64: ids of the tokens whose logprobs are wanted."""
    temperatures: Tensor
    """[N] float32: divisor of each token's logits, the same as in the generator."""
    input_pos: Tensor | None = None
    """[1, T] int64: each token's position in its sequence; None if every sequence has a row."""
    sequence_numbers: Tensor | None = None
    """[1, T] int64: number of each token's sequence; None if every sequence has a row."""

    def to(self, device: torch.device) -> TokenBatch:
        """Return the same batch on a device."""
        on_device = {
            field.name: column.to(device)
            for field in fields(self)
            if (column := getattr(self, field.name)) is not None
        }
        return TokenBatch(**on_device)


def token_batch(
    trajectories: Sequence[Trajectory | TokenSequence],
    masks: Sequence[NDArray[np.bool_]] | None = None,
    *,
    packed_width: int | None = None,
) -> TokenBatch:
    """Lay trajectories out for one forward pass.

    Args:
        trajectories: B trajectories or token sequences.
        masks: [R] bool for each of them, which response tokens are wanted; None means all.
        packed_width: pack all sequences into one row of at least this width; None gives each
            sequence its own row.

    Returns:
        The batch; its positions are in the order of the trajectories.
    """
    lengths = [len(t.prompt_ids) + len(t.response_ids) for t in trajectories]
    if packed_width is None:
        shape = (len(trajectories), max(lengths))
        starts = [number * shape[1] for number in range(len(trajectories))]
        layout: dict[str, Tensor] = {}
    else:
        shape = (1, max(packed_width, sum(lengths)))
        starts = [0, *itertools.accumulate(lengths)]
        input_pos, numbers = row_layout(lengths, shape[1])
        layout = {"input_pos": input_pos, "sequence_numbers": numbers}
    tokens = torch.zeros(shape, dtype=torch.int64)
    flat = tokens.view(-1)
    positions, targets, temperatures = [], [], []
    for number, t in enumerate(trajectories):
        prompt, response = torch.tensor(t.prompt_ids), torch.tensor(t.response_ids)
        start = starts[number]
        flat[start : start + lengths[number]] = torch.cat([prompt, response])
        wanted = torch.arange(len(response))
        if masks is not None:
            wanted = wanted[torch.tensor(masks[number])]
        positions.append(start + len(prompt) - 1 + wanted)
        targets.append(response[wanted])
        temperatures.append(torch.full((len(wanted),), t.temperature))
    columns = (torch.cat(column) for column in (positions, targets, temperatures))
    return TokenBatch(tokens, *columns, **layout)


def logprobs_and_entropies(
    logits: Tensor, targets: Tensor, temperatures: Tensor, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Return the logprobs of the targets, and the entropies of their distributions.

    Args:
        logits: [N, V] of any floating dtype, not yet divided by the temperature.
        targets: [N] int64 token ids.
        temperatures: [N] float32 sampling temperatures.
        entropy_gradient: compute the entropy with a gradient.

    Returns:
        Natural-log probabilities [N] float32, and entropies [N] float32 in nats.
    """
    logprobs = torch.log_softmax(logits.float() / temperatures[:, None], dim=-1)
    seen = logprobs if entropy_gradient else logprobs.detach()
    entropy = -(seen.exp() * seen).sum(dim=-1)
    return logprobs.gather(1, targets[:, None]).squeeze(1), entropy


class ResponseLogprobs:
    """Makes a torchtune decoder return logprobs of wanted tokens instead of logits.

    It replaces the decoder's method `unembed`, because the projection to the vocabulary must stay
    inside the decoder's forward pass, where FSDP has gathered the weights. The backward pass
    recomputes each chunk, so at most chunk_tokens x V logits are in memory.

    Args:
        model: a torchtune TransformerDecoder, sharded or not.
        chunk_tokens: positions projected to the vocabulary at a time.
        entropy_gradient: compute the entropy with a gradient, for an entropy bonus.
        compile_softmax: compile the operations after the projection with torch.compile.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        chunk_tokens: int,
        entropy_gradient: bool = False,
        compile_softmax: bool = False,
    ) -> None:
        self._model = model
        self._batch: TokenBatch | None = None
        self._chunk, self._entropy_gradient = chunk_tokens, entropy_gradient
        # One graph for all sizes, so that recomputation uses the same graph as the forward pass.
        self._softmax: Callable[..., tuple[Tensor, Tensor]] = (
            torch.compile(logprobs_and_entropies, dynamic=True)
            if compile_softmax
            else logprobs_and_entropies
        )
        cast(Any, model).unembed = types.MethodType(
            lambda module, hidden: self._unembed(module, hidden), model
        )

    def __call__(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """Return the logprobs of the batch's targets, and the entropies of their distributions.

        Returns:
            Natural-log probabilities [N] float32, and entropies [N] float32 in nats.
        """
        self._batch = batch
        attention: dict[str, Any] = {}
        if batch.sequence_numbers is not None:
            mask = document_mask(batch.sequence_numbers)
            attention = {"mask": mask, "input_pos": batch.input_pos}
        try:
            return self._model(batch.tokens, **attention)
        finally:
            self._batch = None

    def _unembed(self, module: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
        batch = self._batch
        assert batch is not None, "the decoder is only called through ResponseLogprobs"
        hidden = module.norm(hidden).flatten(0, 1).index_select(0, batch.positions)

        def project(chunk: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
            logits = module.output(chunk)
            return self._softmax(logits, targets, temperatures, self._entropy_gradient)

        def recomputed(*args: Tensor) -> tuple[Tensor, Tensor]:
            return checkpoint(project, *args, use_reentrant=False)  # pyright: ignore

        run = recomputed if torch.is_grad_enabled() else project
        columns = (hidden, batch.targets, batch.temperatures)
        chunks = zip(*(column.split(self._chunk) for column in columns), strict=True)
        logprobs, entropies = zip(*(run(*chunk) for chunk in chunks), strict=True)
        return torch.cat(logprobs), torch.cat(entropies)
