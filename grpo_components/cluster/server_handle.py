"""Calls the parameter server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpo_components.cluster.role import Role


class ParameterServerHandle:
    """Calls the parameter server, which holds the newest published weights."""

    def __init__(self, role: Role, timeout_s: float) -> None:
        self._role, self._timeout_s = role, timeout_s

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

    async def begin_again(self) -> None:
        """Restart the server, without a snapshot, for the next attempt."""
        await self._role.begin_again()
