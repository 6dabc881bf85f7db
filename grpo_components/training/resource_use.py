"""How well a training step used its device: memory, and operations per second."""

from __future__ import annotations

import resource
from collections.abc import Sequence

import torch
from torch import nn

from grpo_components.models.flops import ModelFlops, peak_flops


class ResourceUse:
    """Measures training steps of one trainer rank.

    Args:
        model: a torchtune decoder, sharded or not.
        device: of this rank.
        dtype: compute dtype, fp32 or bf16.
        num_ranks: trainer ranks, each with the same kind of device.
        log_peak_memory_stats: measure this process's largest memory so far.
    """

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
        self, sequences: Sequence[tuple[int, int]], passes: int, start_known: bool, seconds: float
    ) -> dict[str, float]:
        """Metrics of one step.

        Args:
            sequences: number of tokens and of trained tokens of each sequence, over all ranks.
            passes: forward and backward passes over each.
            start_known: one more forward pass came first.
            seconds: duration of the step.

        Returns:
            `throughput/mfu` (model FLOPs utilization, a share of the GPUs' peak) for GPUs whose
            peak is known; `memory/trainer_peak_gib` if enabled.
        """
        metrics: dict[str, float] = {}
        if self._peak_flops:
            done = self.flops.train(sequences) * (passes + (1 / 3 if start_known else 0))
            metrics["throughput/mfu"] = done / (seconds * self._peak_flops)
        if self._log_memory:
            metrics["memory/trainer_peak_gib"] = peak_memory_gib(self._device)
        return metrics


def peak_memory_gib(device: torch.device) -> float:
    """Largest memory of this process so far, in GiB: its tensors on a GPU, all of it on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
