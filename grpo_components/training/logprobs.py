"""Logprobs of response tokens only, projected in recomputed chunks: `[B, T, V]` never exists."""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
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

    def to(self, device: torch.device) -> TokenBatch:
        """The same batch on a device."""
        return TokenBatch(
            self.tokens.to(device), self.positions.to(device), self.targets.to(device)
        )


def token_batch(trajectories: list[Trajectory], sampled_only: bool) -> TokenBatch:
    """Lay trajectories out for one forward pass.

    Args:
        trajectories: B records.
        sampled_only: ask for the tokens that the policy sampled; otherwise for all of [R].

    Returns:
        The batch; positions run through the trajectories in order.
    """
    lengths = [len(t.prompt_ids) + len(t.response_ids) for t in trajectories]
    width = max(lengths)
    tokens = torch.zeros(len(trajectories), width, dtype=torch.int64)
    positions, targets = [], []
    for row, t in enumerate(trajectories):
        prompt, response = torch.tensor(t.prompt_ids), torch.tensor(t.response_ids)
        tokens[row, : lengths[row]] = torch.cat([prompt, response])
        wanted = torch.arange(len(response))
        if sampled_only:
            wanted = wanted[torch.tensor(t.response_mask)]
        positions.append(row * width + len(prompt) - 1 + wanted)
        targets.append(response[wanted])
    return TokenBatch(tokens, torch.cat(positions), torch.cat(targets))


class ResponseLogprobs:
    """A torchtune decoder that returns logprobs of wanted tokens in place of logits.

    The decoder's `unembed` is replaced, so that the projection stays inside the module's forward
    (under FSDP the weights are gathered only there). Each chunk is recomputed in backward; the peak
    is chunk x V values.

    Args:
        model: a torchtune TransformerDecoder, sharded or not.
        temperature: logits are divided by it, as the generator's are.
        chunk_tokens: positions projected at a time.
    """

    def __init__(self, model: nn.Module, *, temperature: float, chunk_tokens: int) -> None:
        self._model = model
        self._batch: TokenBatch | None = None
        self._temperature, self._chunk = temperature, chunk_tokens
        cast(Any, model).unembed = types.MethodType(
            lambda module, hidden: self._unembed(module, hidden), model
        )

    def __call__(self, batch: TokenBatch) -> Tensor:
        """Natural-log probabilities [N] float32 of the batch's targets."""
        self._batch = batch
        try:
            return self._model(batch.tokens)
        finally:
            self._batch = None

    def _unembed(self, module: Any, hidden: Tensor) -> Tensor:
        assert self._batch is not None, "the decoder is only called through ResponseLogprobs"
        hidden = module.norm(hidden).flatten(0, 1).index_select(0, self._batch.positions)

        def project(chunk: Tensor, targets: Tensor) -> Tensor:
            logits = module.output(chunk).float() / self._temperature
            return -F.cross_entropy(logits, targets, reduction="none")

        def recomputed(chunk: Tensor, targets: Tensor) -> Tensor:
            return checkpoint(project, chunk, targets, use_reentrant=False)  # pyright: ignore

        run = recomputed if torch.is_grad_enabled() else project
        chunks = zip(hidden.split(self._chunk), self._batch.targets.split(self._chunk), strict=True)
        return torch.cat([run(chunk, targets) for chunk, targets in chunks])
