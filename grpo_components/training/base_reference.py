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


@torch.no_grad()
def add_reference_logprobs(
    trajectories: Sequence[Trajectory],
    model: nn.Module,
    logprobs: ResponseLogprobs,
    plan: Callable[[list[Part]], list[list[int]]],
    device: torch.device,
) -> None:
    """Set `reference_logprobs` of a global batch; a collective of all ranks.

    The frozen base model is inside the adapted policy: the same weights, without the adapters.
    """
    lengths = [len(t.response_ids) for t in trajectories]
    ends = torch.tensor(lengths).cumsum(0).tolist()
    flat = torch.zeros(sum(lengths), device=device)
    read = [number for number, length in enumerate(lengths) if length]
    micro_batches = plan(parts_of([trajectories[number] for number in read])) if read else []
    with disable_adapter(model):
        for indices in micro_batches:
            # A rank without a micro-batch of its own still has to join the others' collectives.
            numbers = [read[i] for i in indices] or read[:1]
            batch = token_batch([trajectories[n] for n in numbers], device=device)
            parts = logprobs(batch)[0].split([lengths[n] for n in numbers])
            for number, part in zip(numbers if indices else (), parts, strict=bool(indices)):
                flat[ends[number] - lengths[number] : ends[number]] = part
    dist.all_reduce(flat)  # each rank has computed the logprobs of other responses
    for trajectory, part in zip(trajectories, flat.cpu().split(lengths), strict=True):
        trajectory.reference_logprobs = part.numpy()
