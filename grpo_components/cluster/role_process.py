"""One process of a role; each restart of the role replaces it by a new one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError

from grpo_components.cluster.ray_cluster import on_node, this_node


@dataclass
class RoleProcess:
    """Handle of a role's process, from its start to its end."""

    incarnation: int
    """Number of this process among the role's processes, from 0."""
    host: Any
    """The Ray actor that holds the role."""
    starting: Any
    """Reference to what the actor's `start` returns."""
    kill_host: Callable[[Any], None] = ray.kill
    """Function that kills the actor's process."""
    pid: int = 0
    """Process id on its node; 0 until it is known."""
    node_id: str = ""
    """Id of the node in Ray; empty until it is known."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the process is replaced."""
    _senders: dict[int, Callable[..., Any]] = field(default_factory=dict)

    def sender(self, num_returns: int) -> Callable[..., Any]:
        """Return the function that sends a call, which Ray takes long to build."""
        if num_returns not in self._senders:
            options = self.host.call.options(num_returns=num_returns)
            self._senders[num_returns] = options.remote
        return self._senders[num_returns]

    def kill(self) -> None:
        """Kill the process, even if it is suspended."""
        with contextlib.suppress(RayError):
            self.kill_host(self.host)
        self.signal(signal.SIGKILL)

    def signal(self, number: int) -> None:
        """Send a signal to the process, if its pid is known."""
        if not self.pid:
            return
        if self.node_id == this_node():
            _signal(self.pid, number)
            return
        with contextlib.suppress(RayError):  # the node, or Ray itself, has gone
            on_node(self.node_id, _signal, self.pid, number)

    async def wait_turn(self, turn: Callable[[], Awaitable[Any]]) -> bool:
        """Wait for a turn in a replay, or until the process is replaced."""
        if self.ended.is_set():
            return False
        waiting = asyncio.ensure_future(turn())
        ended = asyncio.create_task(self.ended.wait())
        try:
            await asyncio.wait({waiting, ended}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
            came = waiting.done() or not waiting.cancel()
        if came:
            waiting.result()
        return came


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
