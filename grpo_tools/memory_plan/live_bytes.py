"""Counts the bytes of live tensors, also while code runs on fake tensors without memory."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operators made and that are still alive.

    Use `counting` or `imagining` to make one. Like PyTorch's allocator, it counts a storage once,
    whatever the number of its views. It does not see what a kernel allocates.
    """

    def __init__(self, fake_mode: FakeTensorMode | None) -> None:
        super().__init__()
        self._fake_mode = fake_mode
        self.live = 0
        """Bytes alive now."""
        self.peak = 0
        """Largest `live` since the last `mark`."""
        self._sizes: dict[int, int] = {}

    def mark(self) -> int:
        """Return `peak`, and reset it to the bytes alive now."""
        last, self.peak = self.peak, self.live
        return last

    def resize(self, storage: torch.UntypedStorage) -> None:
        """Count the new size of a storage that was resized in place, as FSDP does."""
        if id(storage) in self._sizes:
            self._add(storage.nbytes() - self._sizes[id(storage)])
            self._sizes[id(storage)] = storage.nbytes()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # PyTorch calls again, with the local tensors
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            # DTensor makes tensors of a fake mode of its own, to learn shapes.
            if isinstance(leaf, Tensor) and getattr(leaf, "fake_mode", self._fake_mode) is (
                self._fake_mode
            ):
                self._see(leaf.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        if id(storage) not in self._sizes:
            weakref.finalize(storage, self._freed, id(storage))
            self._sizes[id(storage)] = storage.nbytes()
            self._add(storage.nbytes())

    def _freed(self, key: int) -> None:
        self.live -= self._sizes.pop(key)

    def _add(self, nbytes: int) -> None:
        self.live += nbytes
        self.peak = max(self.peak, self.live)


@contextlib.contextmanager
def counting(fake_mode: FakeTensorMode | None = None) -> Iterator[LiveBytes]:
    """Context manager: count the bytes of tensors that this thread makes."""
    live, resize = LiveBytes(fake_mode), torch.UntypedStorage.resize_

    def counted(storage: torch.UntypedStorage, nbytes: int) -> Any:
        result = resize(storage, nbytes)
        live.resize(storage)
        return result

    with live, mock.patch.object(torch.UntypedStorage, "resize_", counted):
        yield live


@contextlib.contextmanager
def imagining() -> Iterator[LiveBytes]:
    """Context manager: make new tensors fake (shapes without memory), and count their bytes."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, counting(mode) as live:
        yield live


@contextlib.contextmanager
def imagined_ranks(num_ranks: int) -> Iterator[None]:
    """Context manager: make this process rank 0 of a fake process group without other processes."""
    # PyTorch's own stand-in for a process group; importing it registers the backend.
    from torch.testing._internal.distributed import fake_pg

    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
