"""Keeps an optimizer's state in CPU memory while others use the trainer's GPU."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

_CPU = torch.device("cpu")


@contextlib.contextmanager
def state_on_device(
    optimizer: Optimizer, device: torch.device, *, active: bool
) -> Iterator[dict[str, float]]:
    """Context manager: the state is on the device; afterwards gradients and caches are freed.

    It gives a dict to which the end adds the metric `time/offload`, the seconds of both moves.
    Where the device is a CPU, the state moves to other memory of it, to take the same path.
    """
    metrics: dict[str, float] = {}
    if not active:
        yield metrics
        return
    began = time.perf_counter()
    _move(optimizer, device)
    seconds = time.perf_counter() - began
    yield metrics
    began = time.perf_counter()
    optimizer.zero_grad(set_to_none=True)
    _move(optimizer, _CPU)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # else the generator could not have what PyTorch keeps
    metrics["time/offload"] = seconds + time.perf_counter() - began


def _move(optimizer: Optimizer, device: torch.device) -> None:
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.ndim > 0:  # a count of steps may be anywhere
                state[name] = moved(value, device)
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a copy in other memory, page-locked if it comes from a GPU; it may go on meanwhile."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if type(local) is not Tensor:  # quantized state
        return tensor.to(device, copy=True)
    is_pinned = device.type == "cpu" and local.device.type == "cuda"
    return torch.empty_like(tensor, device=device, pin_memory=is_pinned).copy_(
        tensor, non_blocking=True
    )
