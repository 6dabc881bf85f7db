"""Logprobs of response tokens only, projected in recomputed chunks: `[B, T, V]` never exists."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from grpo_components.trajectory import Trajectory


@dataclass(frozen=True)
class TokenBatch:
    """Right-padded sequences and the flat positions whose next token is wanted."""

    tokens: Tensor
    """[B, T] int64; padding lies to the right, where causal attention cannot see it."""
    positions: Tensor
    """[N] int64, indices into the flattened [B * T]: the hidden state that predicts the target."""
    targets: Tensor
    """[N] int64 token ids."""
    temperatures: Tensor
    """[N] float32: what each token's logits are divided by, as the generator's were."""

    def to(self, device: torch.device) -> TokenBatch:
        """The same batch on a device."""
        return TokenBatch(
            self.tokens.to(device),
            self.positions.to(device),
            self.targets.to(device),
            self.temperatures.to(device),
        )


def token_batch(
    trajectories: Sequence[Trajectory], masks: Sequence[NDArray[np.bool_]] | None = None
) -> TokenBatch:
    """Lay trajectories out for one forward pass.

    Args:
        trajectories: B records.
        masks: [R] bool for each: the response tokens wanted; None wants all of them.

    Returns:
        The batch; positions run through the trajectories in order.
    """
    lengths = [len(t.prompt_ids) + len(t.response_ids) for t in trajectories]
    width = max(lengths)
    tokens = torch.zeros(len(trajectories), width, dtype=torch.int64)
    positions, targets, temperatures = [], [], []
    for row, t in enumerate(trajectories):
        prompt, response = torch.tensor(t.prompt_ids), torch.tensor(t.response_ids)
        tokens[row, : lengths[row]] = torch.cat([prompt, response])
        wanted = torch.arange(len(response))
        if masks is not None:
            wanted = wanted[torch.tensor(masks[row])]
        positions.append(row * width + len(prompt) - 1 + wanted)
        targets.append(response[wanted])
        temperatures.append(torch.full((len(wanted),), t.temperature))
    return TokenBatch(tokens, torch.cat(positions), torch.cat(targets), torch.cat(temperatures))


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
        try:
            return self._model(batch.tokens)
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
