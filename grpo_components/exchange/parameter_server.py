"""The parameter server: knows where the newest weights are, and who loaded which version."""

from __future__ import annotations

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
        self._acknowledged: dict[str, int] = {}

    def push(self, version: int, buckets: list[Any], manifests: list[Any]) -> None:
        """Publish a snapshot.

        Args:
            version: policy version of the weights, above the last pushed one.
            buckets: one reference per trainer rank, to its bucket `(manifest, bytes)`.
            manifests: one reference per trainer rank, to its manifest alone.

        Raises:
            ValueError: the version is not newer than the last pushed one.
        """
        if version <= self._version:
            raise ValueError(f"parameter server: version {version} pushed after {self._version}")
        self._version = version
        self._buckets, self._manifests = list(buckets), list(manifests)

    def newest(self) -> tuple[int, list[Any], list[Any]]:
        """Return the newest version, and the references to its buckets and manifests.

        Raises:
            LookupError: nothing was pushed yet.
        """
        if self._version < 0:
            raise LookupError("parameter server: no weights were pushed yet")
        return self._version, self._buckets, self._manifests

    def acknowledge(self, generator: str, version: int) -> None:
        """Record that a generator validated and loaded a version.

        Raises:
            ValueError: the version is newer than any that was pushed.
        """
        if version > self._version:
            problem = f"acknowledged version {version}, newest is {self._version}"
            raise ValueError(f"{generator}: {problem}")
        self._acknowledged[generator] = version

    def acknowledged(self) -> dict[str, int]:
        """Return the version that each generator last loaded."""
        return dict(self._acknowledged)
