"""Keeps an optimizer's state in CPU memory while others use the trainer's GPU."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

_CPU = torch.device("cpu")


class OptimizerOffload:
    """Moves the state of an optimizer to CPU memory and back, tensor by tensor.

    State that is in CPU memory by itself, such as AdamW's step counts without `fused`, stays there.
    Where the device is a CPU, the state moves to other memory of it, so that every run with turns
    takes this path.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device, *, active: bool = True) -> None:
        self._optimizer, self._device, self._active = optimizer, device, active
        self._away: list[tuple[Any, Any]] = []
        """Each tensor that was moved, as the dict or list that has it, and its place there."""

    @contextlib.contextmanager
    def on_device(self) -> Iterator[dict[str, float]]:
        """Context manager: the state is on the device; afterwards gradients and caches are freed.

        It gives a dict to which the end adds the metric `time/offload`, the seconds of both moves.
        """
        metrics: dict[str, float] = {}
        if not self._active:
            yield metrics
            return
        began = time.perf_counter()
        self._bring_back()
        seconds = time.perf_counter() - began
        yield metrics
        began = time.perf_counter()
        self._send_away()
        metrics["time/offload"] = seconds + time.perf_counter() - began

    def _bring_back(self) -> None:
        for holder, place in self._away:
            holder[place] = moved(holder[place], self._device)
        self._away.clear()
        self._wait()

    def _send_away(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        for holder, place in list(_tensors(self._optimizer.state)):
            if holder[place].device.type == self._device.type:
                holder[place] = moved(holder[place], _CPU, pinned=self._device.type == "cuda")
                self._away.append((holder, place))
        self._wait()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # else the generator could not have what PyTorch keeps

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def moved(tensor: Tensor, device: torch.device, *, pinned: bool = False) -> Tensor:
    """Return a copy of a tensor in other memory, even if the device is the same.

    The copy may go on when this returns, if either side is pinned.
    """
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if type(local) is not Tensor:
        return tensor.to(device, copy=True)
    copy = torch.empty_like(tensor, device=device, pin_memory=pinned, requires_grad=False)
    return copy.copy_(tensor, non_blocking=True)


def _tensors(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the place of every tensor in nested dicts and lists: its holder and key or index."""
    items: Any = ()
    if isinstance(value, MutableMapping):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, item in items:
        if isinstance(item, Tensor):
            yield value, key
        else:
            yield from _tensors(item)
