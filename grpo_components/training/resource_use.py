"""Measures how well training steps use their devices: memory, and FLOPs per second."""

from __future__ import annotations

import resource
from collections.abc import Sequence

import torch
from torch import nn

from grpo_components.models.flops import ModelFlops, peak_flops
from grpo_components.models.shared_prompts import Part


class ResourceUse:
    """Computes the FLOPs utilization (all ranks) and peak memory (this rank) of training steps."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        dtype: str,
        num_ranks: int,
        log_peak_memory_stats: bool,
    ) -> None:
        self.flops = ModelFlops.of(model)
        self._device, self._log_memory = device, log_peak_memory_stats
        peak = None
        if device.type == "cuda":
            peak = peak_flops(torch.cuda.get_device_name(device), dtype)
        self._peak_flops = peak and peak * num_ranks

    def metrics(
        self,
        parts: Sequence[Part],
        num_logprobs: int,
        passes: int,
        start_known: bool,
        seconds: float,
    ) -> dict[str, float]:
        """Return the metrics of a step that trained `passes` times on responses of sizes `parts`.

        `start_known`: the step also made a forward pass, for the logprobs at its start.
        """
        metrics: dict[str, float] = {}
        if self._peak_flops:
            done = self.flops.train(parts, num_logprobs) * (passes + (1 / 3 if start_known else 0))
            metrics["throughput/mfu"] = done / (seconds * self._peak_flops)
        if self._log_memory:
            metrics["memory/trainer_peak_gib"] = peak_memory_gib(self._device)
        return metrics


def peak_memory_gib(device: torch.device) -> float:
    """Return this process's peak memory in GiB: on a GPU its tensors, on a CPU everything."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
