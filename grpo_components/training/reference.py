"""Adds a frozen model's logprobs (reference or teacher) to groups before they enter the buffer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from grpo_components.models.loading import load_whole_model
from grpo_components.models.logprobs import ResponseLogprobs, parts_of, token_batch
from grpo_components.models.micro_batches import plan_micro_batches
from grpo_components.objective.reward_shaping import sequence_kl
from grpo_components.trajectory import PackedTrajectories, response_numbers, unpack


class Reference:
    """Computes a frozen model's logprobs of sampled tokens, with the trainer's own code."""

    def __init__(
        self,
        *,
        build_model: Callable[[], nn.Module],
        build_checkpointer: Callable[[], Any] | None,
        device: str,
        dtype: str,
        kl_estimator: str,
        tokens_per_micro_batch: int,
        logprob_chunk_tokens: int,
        num_ids: int | None = None,
        field: Literal["reference_logprobs", "teacher_logprobs"] = "reference_logprobs",
    ) -> None:
        self._field, self._device = field, torch.device(device)
        model = load_whole_model(build_model, build_checkpointer, self._device, dtype)
        self._logprobs = ResponseLogprobs(model, chunk_tokens=logprob_chunk_tokens, num_ids=num_ids)
        self._kl_estimator, self._token_budget = kl_estimator, tokens_per_micro_batch

    @torch.no_grad()
    def add_logprobs(self, group: PackedTrajectories) -> tuple[PackedTrajectories, list[float]]:
        """Return the group with this model's logprobs, and the divergence of each response.

        The divergence estimates KL(generator || this model) in nats, summed over sampled tokens.
        """
        trajectories = unpack(group)
        parts = parts_of(trajectories)
        (plan,) = plan_micro_batches(parts, lambda tokens, _: tokens, 1, self._token_budget)
        logprobs: list[NDArray[np.float32]] = [np.empty(0, np.float32)] * len(trajectories)
        for indices in plan:
            members = [trajectories[i] for i in indices]
            batch = token_batch(members, device=self._device)
            parts = self._logprobs(batch)[0].cpu().split([len(t.response_ids) for t in members])
            for index, part in zip(indices, parts, strict=True):
                logprobs[index] = part.numpy()
        flat = np.concatenate(logprobs)
        sampled = group["response_mask"][0]
        divergences = sequence_kl(
            torch.from_numpy(group["generator_logprobs"][0][sampled]),
            torch.from_numpy(flat[sampled]),
            [int(t.response_mask.sum()) for t in trajectories],
            self._kl_estimator,
        )
        of_responses = np.bincount(response_numbers(group), weights=divergences)
        added = (flat, group["response_ids"][1])
        return {**group, self._field: added}, of_responses.tolist()
