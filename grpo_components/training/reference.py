"""The frozen reference policy: adds its logprobs to groups on their way to the buffer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from grpo_components.training.logprobs import ResponseLogprobs, token_batch
from grpo_components.training.micro_batches import plan_micro_batches
from grpo_components.training.model import load_whole_model
from grpo_components.trajectory import PackedTrajectories, pack, unpack


class Reference:
    """Logprobs of the base model, through the same code as the trainer's.

    Args:
        build_model: makes the torchtune decoder.
        build_checkpointer: makes the torchtune checkpointer of the base model.
        device: cpu or cuda.
        dtype: compute dtype, fp32 or bf16.
        temperature: of sampling; logits are divided by it.
        tokens_per_micro_batch: padded tokens in one forward pass.
        logprob_chunk_tokens: positions projected at a time.
    """

    def __init__(
        self,
        *,
        build_model: Callable[[], nn.Module],
        build_checkpointer: Callable[[], Any],
        device: str,
        dtype: str,
        temperature: float,
        tokens_per_micro_batch: int,
        logprob_chunk_tokens: int,
    ) -> None:
        self._device = torch.device(device)
        model = load_whole_model(build_model, build_checkpointer, self._device, dtype)
        self._logprobs = ResponseLogprobs(
            model, temperature=temperature, chunk_tokens=logprob_chunk_tokens
        )
        self._token_budget = tokens_per_micro_batch

    @torch.no_grad()
    def add_logprobs(self, group: PackedTrajectories) -> PackedTrajectories:
        """Fill `reference_logprobs` of every trajectory.

        Args:
            group: packed trajectories.

        Returns:
            The same group, packed, with [R] float32 reference logprobs.
        """
        trajectories = unpack(group)
        lengths = [len(t.prompt_ids) + len(t.response_ids) for t in trajectories]
        for indices in plan_micro_batches(lengths, 1, self._token_budget)[0]:
            members = [trajectories[i] for i in indices]
            batch = token_batch(members, sampled_only=False).to(self._device)
            flat = self._logprobs(batch).cpu()
            parts = flat.split([len(t.response_ids) for t in members])
            for trajectory, logprobs in zip(members, parts, strict=True):
                trajectory.reference_logprobs = logprobs.numpy()
        return pack(trajectories)
