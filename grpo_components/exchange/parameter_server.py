"""The parameter server: knows where the newest weights are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class VLLMParameterServer:
    """Hands snapshots of the policy's weights from the trainer (push) to the generators (pull).

    It holds references to immutable buckets in Ray's object store, never their bytes. So it needs
    no lock and no GPU, no reader sees parts of two versions, and each node has one copy. A
    superseded snapshot is freed when its last reader is done.
    """

    def __init__(self) -> None:
        self._version = -1
        self._buckets: list[Any] = []
        self._manifests: list[Any] = []
        self._chain: list[tuple[int, list[Any]]] = []

    def push(
        self,
        version: int,
        buckets: list[Any],
        manifests: list[Any],
        chain: Iterable[tuple[int, list[Any]]] = (),
    ) -> None:
        """Publish a snapshot."""
        if version <= self._version:
            raise ValueError(f"parameter server: version {version} pushed after {self._version}")
        self._version = version
        self._buckets, self._manifests = list(buckets), list(manifests)
        self._chain = [(number, list(each)) for number, each in chain]

    def newest(self, held: int = -1) -> tuple[int, list[Any], list[Any]]:
        """Return the newest version, and the references to its buckets and manifests."""
        if self._version < 0:
            raise LookupError("parameter server: no weights were pushed yet")
        versions = [number for number, _ in self._chain]
        later = self._chain[versions.index(held) + 1 :] if held in versions else self._chain
        if held == self._version:
            later = []
        buckets = [bucket for _, each in later for bucket in each] + self._buckets
        return self._version, buckets, self._manifests
