"""Calls the parameter server, and lets it write each policy version beside the training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpo_components.cluster.calls import Part
from grpo_components.cluster.role import Role

_KEEP_LANE = "keep"
"""Thread in which the parameter server writes and reads versions, one after the other."""


class ParameterServerHandle:
    """Calls the parameter server, which holds the newest published weights."""

    def __init__(self, role: Role, timeout_s: float, *, keeps_versions: bool = False) -> None:
        self._role, self._timeout_s = role, timeout_s
        self.keeps_versions = keeps_versions
        self._keeping: tuple[tuple[int, int], Part] | None = None
        """The version that is being written, or was last: attempt and number; and the call."""

    async def push(
        self,
        version: int,
        buckets: Sequence[Any],
        manifests: Sequence[Any],
        chain: Sequence[tuple[int, Sequence[Any]]] = (),
    ) -> None:
        """Publish a snapshot; see `VLLMParameterServer.push`."""
        await self._role.call("push", version, buckets, manifests, chain, timeout_s=self._timeout_s)

    async def newest(self, held: int = -1) -> tuple[int, list[Any], list[Any]]:
        """Return the newest snapshot; see `VLLMParameterServer.newest`."""
        return await self._role.call("newest", held, timeout_s=self._timeout_s)

    async def acknowledge(self, generator: str, version: int) -> None:
        """Report that a generator has loaded a version."""
        await self._role.call("acknowledge", generator, version, timeout_s=self._timeout_s)

    async def keep(self, attempt: int, version: int, pushes: Sequence[Any]) -> None:
        """Start to write a version to its file; wait for the one before, so that none gets lost."""
        if not self._keeping or self._keeping[0] != (attempt, version):
            await self.wait_kept()
            call = self._role.submit("keep", attempt, version, *pushes, lane=_KEEP_LANE)
            self._keeping = (attempt, version), call

    async def wait_kept(self) -> None:
        """Wait until the last version that `keep` got is in its file."""
        if self._keeping is not None:
            await self._role.result(self._keeping[1], "keep", self._timeout_s)

    async def kept(self, attempt: int, version: int) -> Part | None:
        """Return a reference to the last version, which the server rebuilds from the files."""
        if not self._keeping or self._keeping[0] != (attempt, version):
            return None
        await self.wait_kept()
        return self._role.submit("kept", attempt, version, lane=_KEEP_LANE)

    async def begin_again(self) -> None:
        """Restart the server, without a snapshot, for the next attempt."""
        self._keeping = None
        await self._role.begin_again()
