"""One process of a role, as the driver sees it: sends calls and signals, says how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import (
    ActorUnavailableError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
)

from grpo_components.cluster.ray_cluster import on_node, this_node
from grpo_components.errors import RoleFailedError


@dataclass
class RoleProcess:
    """One process of a role, from its start to its end; each restart makes a new one."""

    incarnation: int
    """Number of this process among the role's processes, from 0."""
    host: Any
    """The Ray actor that holds the role."""
    starting: Any
    """Ray reference to what `RoleHost.start` returns."""
    kill_host: Callable[[Any], None] = ray.kill
    """Function that kills the actor's process."""
    pid: int = 0
    """Process id on its node; 0 until it is known."""
    node_id: str = ""
    """Id of the node in Ray; empty until it is known."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the process is replaced."""
    _senders: dict[int, Callable[..., Any]] = field(default_factory=dict)
    """Number of results -> function that sends a call; kept, as Ray takes long to build it."""

    def send(self, method: str, lane: str, args: tuple[Any, ...], num_returns: int) -> Any:
        """Send a call; return Ray's reference to its result, or a list of references to several."""
        if num_returns not in self._senders:
            options = self.host.call.options(num_returns=num_returns)
            self._senders[num_returns] = options.remote
        return self._senders[num_returns](method, lane, *args)

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
        """In a replay, wait until `turn` returns; return False if the process is replaced first."""
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


def role_failure(
    error: RayError, role: str, method: str, log_file: str, names: Mapping[str, str]
) -> RoleFailedError:
    """Convert an error that Ray raised for a call into the role failure that caused it."""
    cause: Any = error
    while isinstance(cause, RayTaskError):
        cause = cause.cause
    if isinstance(cause, RoleFailedError):
        return cause
    if isinstance(cause, RayActorError):
        name = names.get(cause.actor_id or "", role)
        log = str(Path(log_file).with_name(f"{name}.log"))
        return RoleFailedError(name, _cause_of_death(cause), log, "died")
    if isinstance(cause, ObjectLostError):
        what = f"cannot go on with {method}: data that it needs was lost with another node"
        return RoleFailedError(role, what, log_file, "lost")
    if isinstance(cause, OutOfMemoryError):
        return RoleFailedError(role, _out_of_memory(cause), log_file, "died")
    return RoleFailedError(role, f"failed in {method}: {error}", log_file, "raised")


def _out_of_memory(error: OutOfMemoryError) -> str:
    """Say that memory was full, with the figures from the start of Ray's long message."""
    found = re.search(r"was (\S+) used / (\S+) limit", str(error))
    figures = f", {found[1]} of {found[2]} in use" if found else ""
    return f"died: killed because the machine's memory was full{figures}"


def _cause_of_death(error: RayActorError) -> str:
    """Say how a process ended: the kind of exit, and the first sentence of Ray's explanation."""
    text = " ".join(str(error).split())
    if "its node has died" in text:
        found = re.search(r" ip: (\S+)", text)
        return f"died: its node{f' {found[1]}' if found else ''} died, or cannot be reached"
    if isinstance(error, ActorUnavailableError):
        return "died: its process or its node cannot be reached"
    found = re.search(r"exit type: (\w+) Worker exit detail: (.+?\.)( |$)", text)
    if found is None:
        return f"died: {text}"
    if found[1] == "SYSTEM_ERROR":  # the explanation only says that the connection broke
        return "died: killed, out of memory, or crashed"
    return f"died: {found[1]}: {found[2]}"
