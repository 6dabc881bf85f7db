"""The parameter server: which weights are newest, where they are, and who has loaded which."""

from __future__ import annotations

from typing import Any


class VLLMParameterServer:
    """Versioned snapshots of the policy: the trainer pushes, generators pull.

    It holds references to immutable buckets in the object store, never the bytes: no lock, no torn
    read, no GPU, one copy per node. Superseded snapshots are freed when their last reader is done.
    """

    def __init__(self) -> None:
        self._version = -1
        self._buckets: list[Any] = []
        self._manifests: list[Any] = []
        self._acknowledged: dict[str, int] = {}

    def push(self, version: int, buckets: list[Any], manifests: list[Any]) -> None:
        """Publish a snapshot.

        Args:
            version: policy version of the weights; above the last one.
            buckets: references to each trainer rank's `(manifest, bytes)`.
            manifests: references to the same manifests alone.

        Raises:
            ValueError: if the version is not newer than the published one.
        """
        if version <= self._version:
            raise ValueError(f"push of version {version} after version {self._version}")
        self._version = version
        self._buckets, self._manifests = list(buckets), list(manifests)

    def newest(self) -> tuple[int, list[Any], list[Any]]:
        """The newest version and the references to its buckets and manifests.

        Raises:
            LookupError: before the first push.
        """
        if self._version < 0:
            raise LookupError("no weights were pushed yet")
        return self._version, self._buckets, self._manifests

    def acknowledge(self, generator: str, version: int) -> None:
        """Record that a generator has validated and loaded a version.

        Raises:
            ValueError: if that version was never published.
        """
        if version > self._version:
            raise ValueError(f"{generator} acknowledges {version}, newest is {self._version}")
        self._acknowledged[generator] = version

    def acknowledged(self) -> dict[str, int]:
        """The version that each generator last loaded."""
        return dict(self._acknowledged)
