"""The frozen reference policy: adds its logprobs to groups on their way to the buffer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from grpo_components.models.loading import load_whole_model
from grpo_components.models.logprobs import ResponseLogprobs, token_batch
from grpo_components.models.micro_batches import plan_micro_batches
from grpo_components.models.packing import row_width
from grpo_components.objective.reward_shaping import sequence_kl
from grpo_components.trajectory import PackedTrajectories, pack, unpack


class Reference:
    """Logprobs of the base model, through the same code as the trainer's.

    Args:
        build_model: makes the torchtune decoder.
        build_checkpointer: makes the torchtune checkpointer of the base model.
        device: cpu or cuda.
        dtype: compute dtype, fp32 or bf16.
        kl_estimator: k1, k2 or k3, of the divergence that is reported.
        tokens_per_micro_batch: padded tokens in one forward pass.
        logprob_chunk_tokens: positions projected at a time.
        packing: sequences of a micro-batch share one row, for flex attention.
    """

    def __init__(
        self,
        *,
        build_model: Callable[[], nn.Module],
        build_checkpointer: Callable[[], Any],
        device: str,
        dtype: str,
        kl_estimator: str,
        tokens_per_micro_batch: int,
        logprob_chunk_tokens: int,
        packing: bool,
    ) -> None:
        self._device = torch.device(device)
        model = load_whole_model(build_model, build_checkpointer, self._device, dtype)
        self._logprobs = ResponseLogprobs(model, chunk_tokens=logprob_chunk_tokens)
        self._kl_estimator, self._token_budget = kl_estimator, tokens_per_micro_batch
        self._packed_width = row_width(tokens_per_micro_batch) if packing else None

    @torch.no_grad()
    def add_logprobs(self, group: PackedTrajectories) -> tuple[PackedTrajectories, list[float]]:
        """Fill `reference_logprobs` of every trajectory.

        Args:
            group: packed trajectories.

        Returns:
            The same group, packed, with [R] float32 reference logprobs; and for each trajectory the
            estimated KL(generator || reference), in nats, summed over the tokens sampled.
        """
        trajectories = unpack(group)
        lengths = [len(t.prompt_ids) + len(t.response_ids) for t in trajectories]
        packed = self._packed_width is not None
        (plan,) = plan_micro_batches(lengths, lengths, 1, self._token_budget, packed=packed)
        for indices in plan:
            members = [trajectories[i] for i in indices]
            batch = token_batch(members, packed_width=self._packed_width).to(self._device)
            flat = self._logprobs(batch)[0].cpu()
            parts = flat.split([len(t.response_ids) for t in members])
            for trajectory, logprobs in zip(members, parts, strict=True):
                trajectory.reference_logprobs = logprobs.numpy()
        sampled = np.concatenate([t.response_mask for t in trajectories])
        generator, reference = (
            torch.from_numpy(np.concatenate([getattr(t, name) for t in trajectories])[sampled])
            for name in ("generator_logprobs", "reference_logprobs")
        )
        lengths = [int(t.response_mask.sum()) for t in trajectories]
        return pack(trajectories), sequence_kl(generator, reference, lengths, self._kl_estimator)
