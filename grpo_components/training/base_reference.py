"""Computes reference logprobs with the policy itself, its adapters turned off."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torchtune.modules.peft import disable_adapter

from grpo_components.models.logprobs import ResponseLogprobs, parts_of, token_batch
from grpo_components.models.shared_prompts import Part
from grpo_components.trajectory import Trajectory


class BaseReference:
    """The frozen base model inside an adapted policy: the same weights, without the adapters.

    Args:
        model: policy with adapters, sharded over the ranks.
        logprobs: computes the policy's logprobs.
        device: device of this rank.
        plan: function of what the forward passes read; returns this rank's micro-batches, as many
            on every rank.
    """

    def __init__(
        self,
        model: nn.Module,
        logprobs: ResponseLogprobs,
        device: torch.device,
        plan: Callable[[list[Part]], list[list[int]]],
    ) -> None:
        self._model, self._logprobs, self._device, self._plan = model, logprobs, device, plan

    @torch.no_grad()
    def add_logprobs(self, trajectories: Sequence[Trajectory]) -> None:
        """Set `reference_logprobs` of a global batch; a collective of all ranks.

        Args:
            trajectories: trajectories of the batch, the same on every rank.
        """
        lengths = [len(t.response_ids) for t in trajectories]
        ends = torch.tensor(lengths).cumsum(0).tolist()
        flat = torch.zeros(sum(lengths), device=self._device)
        read = [number for number, length in enumerate(lengths) if length]
        plan = self._plan(parts_of([trajectories[number] for number in read])) if read else []
        with disable_adapter(self._model):
            for indices in plan:
                # A rank without a micro-batch of its own still has to join the others' collectives.
                numbers = [read[i] for i in indices] or read[:1]
                batch = token_batch([trajectories[n] for n in numbers], device=self._device)
                parts = self._logprobs(batch)[0].split([lengths[n] for n in numbers])
                for number, part in zip(numbers if indices else (), parts, strict=bool(indices)):
                    flat[ends[number] - lengths[number] : ends[number]] = part
        dist.all_reduce(flat)  # each rank has computed the logprobs of other responses
        for trajectory, part in zip(trajectories, flat.cpu().split(lengths), strict=True):
            trajectory.reference_logprobs = part.numpy()
