"""Shares tensors with other processes of this machine through anonymous shared memory."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_ALIGNMENT = 64
"""Tensors begin at multiples of this, in bytes; every dtype can be read there."""


@dataclass(frozen=True)
class SharedTensors:
    """Describes where shared tensors are, without their bytes, for a process that opens them."""

    file: str
    """Path under which processes of the same user open the memory until its owner closes it."""
    entries: tuple[tuple[str, str, tuple[int, ...], int], ...]
    """Name, dtype, shape, and offset in bytes of each tensor."""
    nbytes: int


class SharedMemory:
    """Holds copies of tensors in shared memory that other processes can open.

    The kernel frees the memory once it is closed here and no other process uses its tensors.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        entries, end = [], 0
        for name, tensor in tensors.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            entries.append((name, dtype, tuple(tensor.shape), end))
            end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        # Unlike a file in /dev/shm, it has no limit but the machine's memory, and no name to leave.
        self._descriptor = os.memfd_create("weights")
        try:
            os.ftruncate(self._descriptor, end)
            mapped = mmap.mmap(self._descriptor, end)
            for tensor, (_, dtype, shape, offset) in zip(tensors.values(), entries, strict=True):
                _view(mapped, dtype, shape, offset).copy_(tensor)
        except BaseException:
            self.close()
            raise
        path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        self.tensors = SharedTensors(path, tuple(entries), end)
        """What another process needs to open the tensors."""

    def close(self) -> None:
        """Stop other processes from opening the memory; tensors that are in use stay valid."""
        os.close(self._descriptor)


def open_shared(shared: SharedTensors) -> dict[str, Tensor]:
    """Return another process's tensors as views of its memory, by name."""
    with open(shared.file, "rb") as file:
        # A private mapping: torch warns of memory that it must not write to.
        mapped = mmap.mmap(file.fileno(), shared.nbytes, access=mmap.ACCESS_COPY)
    return {
        name: _view(mapped, dtype, shape, offset) for name, dtype, shape, offset in shared.entries
    }


def split(tensors: Mapping[str, Tensor], nbytes: int) -> Iterator[dict[str, Tensor]]:
    """Split tensors, in order, into parts of at most `nbytes`; a larger tensor is its own part."""
    part: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if part and size + tensor.nbytes > nbytes:
            yield part
            part, size = {}, 0
        part[name] = tensor
        size += tensor.nbytes
    if part:
        yield part


def _view(mapped: mmap.mmap, dtype: str, shape: tuple[int, ...], offset: int) -> Tensor:
    numbers = torch.Size(shape).numel()
    if not numbers:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    flat = torch.frombuffer(mapped, dtype=getattr(torch, dtype), count=numbers, offset=offset)
    return flat.view(shape)
