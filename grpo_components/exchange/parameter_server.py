"""The parameter server: knows where the newest model weights are in Ray's object store."""

from __future__ import annotations

from typing import Any


class VLLMParameterServer:
    """Hands snapshots of the policy's weights from the trainer (push) to the generators (pull).

    It holds references to immutable buckets (packed tensors) in Ray's object store, not their
    bytes. So it needs no lock and no GPU, no reader sees parts of two versions, and each node has
    one copy. A superseded snapshot is freed when its last reader is done.
    """

    def __init__(self) -> None:
        self._pushes: list[tuple[int, list[Any]]] = []
        """Version and buckets of the last whole push, and of all deltas since."""
        self._manifests: list[Any] = []

    def push(
        self, version: int, buckets: list[Any], manifests: list[Any], whole: bool = True
    ) -> None:
        """Publish a snapshot: a whole one, or what changed since the last push."""
        if self._pushes and version <= (last := self._pushes[-1][0]):
            raise ValueError(f"parameter server: version {version} pushed after {last}")
        earlier = [] if whole else self._pushes
        self._pushes, self._manifests = [*earlier, (version, buckets)], manifests

    def newest(self, held: int = -1) -> tuple[int, list[Any], list[Any]]:
        """Return the newest version; buckets that update version `held` to it; its manifests."""
        if not self._pushes:
            raise LookupError("parameter server: no weights were pushed yet")
        versions = [version for version, _ in self._pushes]
        first = versions.index(held) + 1 if held in versions else 0
        pushes = self._pushes[first:] or self._pushes[-1:]
        return versions[-1], [each for _, buckets in pushes for each in buckets], self._manifests
