"""Keeps an optimizer's state in CPU memory while the generator uses the trainer's GPU."""

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
    """Context manager: keep the optimizer's state on the device in the block, then on the CPU.

    At the end it also frees the gradients, and adds the metric `time/offload` (seconds of both
    moves) to the dict that it yielded. If the device is a CPU, it copies the state within CPU
    memory, so that runs without a GPU use the same code. If `active` is False, it does nothing.
    """
    metrics: dict[str, float] = {}
    if not active:
        yield metrics
        return
    began = time.perf_counter()
    _move(optimizer, device, device)
    seconds = time.perf_counter() - began
    yield metrics
    began = time.perf_counter()
    optimizer.zero_grad(set_to_none=True)
    _move(optimizer, device, _CPU)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # else PyTorch would keep memory from the generator
    metrics["time/offload"] = seconds + time.perf_counter() - began


def _move(optimizer: Optimizer, trained_on: torch.device, target: torch.device) -> None:
    """Move the state of parameters on `trained_on` to `target`; FSDP itself offloads all others."""
    for parameter, state in optimizer.state.items():
        if parameter.device.type != trained_on.type:
            continue
        for name, value in state.items():
            if isinstance(value, Tensor) and value.ndim > 0:  # a count of steps may be anywhere
                state[name] = moved(value, target)
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Start copying a tensor to a device and return the copy; from GPU to CPU it is page-locked."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if type(local) is not Tensor:  # quantized state
        return tensor.to(device, copy=True)
    is_pinned = device.type == "cpu" and local.device.type == "cuda"
    return torch.empty_like(tensor, device=device, pin_memory=is_pinned).copy_(
        tensor, non_blocking=True
    )
