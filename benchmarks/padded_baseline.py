"""The baseline of the benchmarks: a training step like that of torchtune's GRPO prototype.

As in `recipes/dev/grpo_full_finetune_distributed.py` of torchtune 0.6.1, prompts are left-padded
and responses right-padded to the longest of the batch, with torchtune's own functions: dense masks
[B, T, T], positions, logits [B, T, V] in float32, log-softmax over the whole response width, masked
mean. Unlike there, the batch is split into micro-batches and the mean is over all their tokens, so
that the result equals ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import pad_sequence
from torch.optim import Optimizer
from torchtune import rlhf
from torchtune.data import left_pad_sequence
from torchtune.generation import (
    get_causal_mask_from_padding_mask,
    get_position_ids_from_padding_mask,
)

from grpo_components.trajectory import Trajectory


@dataclass(frozen=True)
class PaddedBatch:
    """A padded batch of S responses with P prompt and R response columns."""

    tokens: Tensor
    """[S, P + R] int64."""
    is_token: Tensor
    """[S, P + R] bool, False for padding."""
    generator_logprobs: Tensor
    """[S, R] float32."""
    reference_logprobs: Tensor
    """[S, R] float32."""
    advantages: Tensor
    """[S] float32."""
    num_prompt_columns: int

    @classmethod
    def of(
        cls,
        trajectories: Sequence[Trajectory],
        advantages: NDArray[np.float32],
        device: torch.device,
    ) -> PaddedBatch:
        """Pad trajectories to the longest prompt and the longest response.

        Args:
            trajectories: S trajectories with reference logprobs; all response tokens are trained.
            advantages: [S] float32.
            device: of the batch.
        """

        def prompts(values: list[Tensor]) -> Tensor:
            return left_pad_sequence(values, batch_first=True)

        def responses(values: list[Tensor]) -> Tensor:
            return pad_sequence(values, batch_first=True)

        prompt_ids = [torch.from_numpy(t.prompt_ids) for t in trajectories]
        response_ids = [torch.from_numpy(t.response_ids) for t in trajectories]
        generator = [torch.from_numpy(t.generator_logprobs) for t in trajectories]
        reference = [torch.as_tensor(t.reference_logprobs) for t in trajectories]
        tokens = torch.cat([prompts(prompt_ids), responses(response_ids)], dim=1)
        is_token = torch.cat(
            [
                prompts([torch.ones_like(ids, dtype=torch.bool) for ids in prompt_ids]),
                responses([torch.ones_like(ids, dtype=torch.bool) for ids in response_ids]),
            ],
            dim=1,
        )
        return cls(
            tokens=tokens.to(device),
            is_token=is_token.to(device),
            generator_logprobs=responses(generator).to(device),
            reference_logprobs=responses(reference).to(device),
            advantages=torch.from_numpy(advantages).to(device),
            num_prompt_columns=max(len(ids) for ids in prompt_ids),
        )

    def rows(self, start: int, end: int) -> PaddedBatch:
        """Return some rows as a micro-batch, which keeps all columns of the batch."""
        part = slice(start, end)
        return PaddedBatch(
            self.tokens[part],
            self.is_token[part],
            self.generator_logprobs[part],
            self.reference_logprobs[part],
            self.advantages[part],
            self.num_prompt_columns,
        )


class PaddedBaseline:
    """Trains a torchtune decoder on padded batches."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        clip: float,
        kl_coeff: float,
        num_micro_batches: int,
        device: str,
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._clip, self._kl_coeff = clip, kl_coeff
        self._num_micro_batches, self._device = num_micro_batches, torch.device(device)

    def train_step(
        self, trajectories: Sequence[Trajectory], advantages: NDArray[np.float32]
    ) -> dict[str, float]:
        """Train on one batch.

        Args:
            trajectories: S trajectories; all response tokens are trained.
            advantages: [S] float32.
        """
        whole = PaddedBatch.of(trajectories, advantages, self._device)
        total_tokens = whole.is_token[:, whole.num_prompt_columns :].sum()
        self._optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self._device)
        for rows in np.array_split(np.arange(len(trajectories)), self._num_micro_batches):
            if not len(rows):
                continue
            losses, mask = self._losses(whole.rows(rows[0], rows[-1] + 1))
            loss = (losses * mask).sum() / total_tokens
            loss.backward()
            total += loss.detach()
        grad_norm = nn.utils.clip_grad_norm_(self._model.parameters(), float("inf"))
        if isinstance(grad_norm, DTensor):
            grad_norm = grad_norm.full_tensor()
        self._optimizer.step()
        return {"loss/total": float(total), "grad_norm": float(grad_norm)}

    def _losses(self, batch: PaddedBatch) -> tuple[Tensor, Tensor]:
        """Return losses [B, R] and the mask [B, R] of response tokens."""
        width = batch.num_prompt_columns
        logits = self._model(
            batch.tokens,
            mask=get_causal_mask_from_padding_mask(batch.is_token),
            input_pos=get_position_ids_from_padding_mask(batch.is_token),
        )
        logits = rlhf.truncate_sequence_for_logprobs(logits, width)
        logprobs = rlhf.logits_to_logprobs(logits, batch.tokens[:, width:])
        del logits
        mask = batch.is_token[:, width:]
        logprobs = logprobs.masked_fill(~mask, 0.0)
        ratios = torch.exp(logprobs - batch.generator_logprobs)
        clipped = ratios.clamp(1 - self._clip, 1 + self._clip)
        advantages = batch.advantages[:, None]
        gap = batch.reference_logprobs - logprobs
        penalty = torch.exp(gap) - gap - 1
        return -torch.minimum(ratios * advantages, clipped * advantages) + (
            self._kl_coeff * penalty
        ), mask
