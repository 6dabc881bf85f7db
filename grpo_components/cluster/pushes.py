"""Decides which pushes are whole, and keeps references to those that later ones build on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from grpo_components.cluster.trainers_handle import TrainersHandle
from grpo_components.exchange.weight_deltas import NO_BASE

MAX_DELTAS = 64
"""Most deltas between two whole pushes: a new generator gets them all, and each push names them."""


@dataclass
class _Push:
    version: int
    buckets: list[Any]
    manifests: list[Any]
    nbytes: int | None = None
    """Known once it is packed."""


class Pushes:
    """Starts each push, whole or as a delta from the one before.

    After a whole push, pushes are deltas as long as they take less room together than the whole
    one, and are at most `MAX_DELTAS`. Only the weights decide, so a replay decides the same.
    """

    def __init__(self, trainers: TrainersHandle, *, deltas: bool) -> None:
        self._trainers, self._deltas = trainers, deltas
        self._chain: list[_Push] = []
        """The last whole push, and all deltas since."""
        self.nbytes = 0
        """Bytes of the last push that is packed, of all ranks; 0 before the first."""

    async def wait_packed(self) -> None:
        """Wait until the last push is packed, if its size is not known: it decides on the next."""
        last = self._chain[-1] if self._chain else None
        if last is None or last.nbytes is not None:
            return
        manifests = await self._trainers.manifests(last.manifests)
        last.nbytes = sum(entry.pushed_nbytes for manifest in manifests for entry in manifest)
        self.nbytes = last.nbytes

    def begin(self, version: int) -> tuple[list[Any], list[Any], list[tuple[int, list[Any]]]]:
        """Start to pack the gathered weights."""
        base = self._base() if self._deltas else None
        last = self._chain[-1] if self._chain else None
        if base in (None, NO_BASE):
            self._chain = []
        push = _Push(version, *self._trainers.export_weights(version, base))
        if not self._deltas and last is not None:
            push.nbytes = last.nbytes  # all whole pushes have the same
        chain = [(earlier.version, earlier.buckets) for earlier in self._chain]
        self._chain.append(push)
        return push.buckets, push.manifests, chain

    def forget(self) -> None:
        """Make the next push a whole one: the trainers may have been restarted."""
        self._chain = []

    def _base(self) -> int:
        """Return the version that the next delta builds on; `NO_BASE` for a whole push."""
        if not self._chain:
            return NO_BASE
        whole, *deltas = (push.nbytes or 0 for push in self._chain)
        like_the_last = sum(deltas) + deltas[-1] if deltas else 0
        if like_the_last > whole or len(deltas) >= MAX_DELTAS:
            return NO_BASE
        return self._chain[-1].version
