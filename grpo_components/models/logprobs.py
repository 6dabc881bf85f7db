"""Logprobs of response tokens only, projected in recomputed chunks: `[B, T, V]` never exists."""

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
    """Sequences, right-padded or packed, and the flat positions whose next token is wanted."""

    tokens: Tensor
    """[B, T] int64; padding lies to the right, where causal attention cannot see it."""
    positions: Tensor
    """[N] int64, indices into the flattened [B * T]: the hidden state that predicts the target."""
    targets: Tensor
    """[N] int64 token ids."""
    temperatures: Tensor
    """[N] float32: what each token's logits are divided by, as the generator's were."""
    input_pos: Tensor | None = None
    """[1, T] int64 where B sequences are packed into one row: each token's place in its own."""
    sequence_numbers: Tensor | None = None
    """[1, T] int64, there: which sequence each token belongs to."""

    def to(self, device: torch.device) -> TokenBatch:
        """The same batch on a device."""
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
        trajectories: B records.
        masks: [R] bool for each: the response tokens wanted; None wants all of them.
        packed_width: packs them into one row of this width, or of their own if that is more; None
            gives each a row.

    Returns:
        The batch; positions run through the trajectories in order.
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
    """Logprobs of the targets, and entropies of what they were drawn from.

    Args:
        logits: [N, V] of any floating dtype, before the temperature.
        targets: [N] int64 token ids.
        temperatures: [N] float32.
        entropy_gradient: the entropy carries a gradient.

    Returns:
        Natural-log probabilities [N] float32, and entropies [N] float32 in nats.
    """
    logprobs = torch.log_softmax(logits.float() / temperatures[:, None], dim=-1)
    seen = logprobs if entropy_gradient else logprobs.detach()
    entropy = -(seen.exp() * seen).sum(dim=-1)
    return logprobs.gather(1, targets[:, None]).squeeze(1), entropy


class ResponseLogprobs:
    """A torchtune decoder that returns logprobs of wanted tokens in place of logits.

    The decoder's `unembed` is replaced, so that the projection stays inside the module's forward
    (under FSDP the weights are gathered only there). Each chunk is recomputed in backward; the peak
    is chunk x V values.

    Args:
        model: a torchtune TransformerDecoder, sharded or not.
        chunk_tokens: positions projected at a time.
        entropy_gradient: the entropy carries a gradient, for a bonus in the loss.
        compile_softmax: compile what follows the projection with torch.compile.
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
        # One graph for all sizes: with two, recomputation could meet another than forward did.
        self._softmax: Callable[..., tuple[Tensor, Tensor]] = (
            torch.compile(logprobs_and_entropies, dynamic=True)
            if compile_softmax
            else logprobs_and_entropies
        )
        cast(Any, model).unembed = types.MethodType(
            lambda module, hidden: self._unembed(module, hidden), model
        )

    def __call__(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """Logprobs of the batch's targets, and the entropy of what each was drawn from.

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
