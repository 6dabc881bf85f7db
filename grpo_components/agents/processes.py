"""Runs each agent in a process of its own, with a deadline, from the agent server's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_components.agents.host import READY
from grpo_components.errors import ConfigError

_START_S = 120.0
"""Maximum seconds for importing the agent's module."""
_KILL_S = 20.0
"""Maximum seconds to wait until killed processes have ended."""
_MAX_SAID = 1000
"""Number of characters from the end of a command's output that its error message quotes."""


@dataclass(frozen=True)
class Outcome:
    """How an agent ended."""

    reward: dict[str, float] | None = None
    """Rewards that the agent's function returned, by name; None if it returned none."""
    error: str | None = None
    """Why the agent's sample has failed; None if the agent ended well."""


class AgentProcesses:
    """Starts an agent for each response: forks it from a host process that has imported it."""

    def __init__(self, agent: str | list[str]) -> None:
        self._agent = agent
        self._name = agent if isinstance(agent, str) else " ".join(agent)
        self._starting = asyncio.Lock()
        self._host: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    async def run(
        self,
        task: Mapping[str, Any],
        variables: Mapping[str, str],
        timeout_s: float,
        failure: asyncio.Future[str],
    ) -> Outcome:
        """Run an agent until it ends, fails or times out; leave none of its processes."""
        ours, theirs = socket.socketpair()
        with theirs:
            await self._start_watcher(theirs)
        reader, writer = await asyncio.open_connection(sock=ours)
        message = {"task": dict(task), "variables": dict(variables)}
        writer.write(json.dumps(message, default=str).encode() + b"\n")
        report = asyncio.create_task(_read(reader))
        try:
            waiting: set[asyncio.Future[Any]] = {report, failure}
            await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if failure.done():
                return Outcome(error=f"agent: {failure.result()}")
            if not report.done():
                limit = f"{timeout_s:g} s, half of timeouts.rollout_s"
                return Outcome(error=f"agent: TimeoutError: {self._name} did not end in {limit}")
            return self._outcome(report.result())
        finally:
            writer.write_eof()  # the watcher then kills what is left
            await asyncio.wait([report], timeout=_KILL_S)
            report.cancel()
            writer.close()

    def close(self) -> None:
        """Kill all agents, and the process that starts them. Any thread may call this."""
        if self._host is None or self._control is None:
            return
        with contextlib.suppress(OSError):  # it has ended already
            self._control.shutdown(socket.SHUT_RDWR)
        try:
            self._host.wait(_KILL_S)
        except subprocess.TimeoutExpired:
            self._host.kill()
            self._host.wait()

    def _outcome(self, report: bytes) -> Outcome:
        if not report:
            return Outcome(error="agent: the process that watches it was killed")
        status, said = json.loads(report)
        is_function = isinstance(self._agent, str)
        if is_function and said:
            try:
                return Outcome(**json.loads(said))
            except (TypeError, ValueError):  # another process of the agent wrote one, too
                return Outcome(error=f"agent: its result cannot be read: {said!r:.100}")
        if status == 0 and not is_function:
            return Outcome()
        if status < 0:
            how = f"was killed by {signal.Signals(-status).name}"
        else:
            how = f"ended with status {status}"
        said = said[-_MAX_SAID:].strip()
        before, _, last = said.rpartition("\n")
        how += f": {last}" if last else ""
        return Outcome(error=f"agent: {self._name} {how}" + (f"\n{said}" if before else ""))

    async def _start_watcher(self, connection: socket.socket) -> None:
        """Let the host (`_host`) fork a watcher, which starts an agent and reports its end."""
        async with self._starting:
            if self._control is None or self._host is None or self._host.poll() is not None:
                self._control = await self._start_host()
            with contextlib.suppress(OSError):  # it has just ended, and so does the connection
                # In a thread, which may wait: a socket holds few descriptors.
                await asyncio.to_thread(
                    socket.send_fds, self._control, [b"1"], [connection.fileno()]
                )

    async def _start_host(self) -> socket.socket:
        control, theirs = socket.socketpair()
        local = os.environ.get("NO_PROXY", os.environ.get("no_proxy", ""))
        no_proxy = ",".join(filter(None, ["127.0.0.1", "localhost", local]))
        self._host = subprocess.Popen(
            [
                *(sys.executable, "-m", "grpo_components.agents.host"),
                *(str(theirs.fileno()), json.dumps(self._agent), os.environ.get("PYTHONPATH", "")),
            ],
            env={
                **os.environ,
                # A Ray worker extends sys.path without setting PYTHONPATH.
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                "PYTHONHASHSEED": "0",  # so that an agent's sets have the same order in a replay
                "NO_PROXY": no_proxy,
                "no_proxy": no_proxy,
            },
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        control.setblocking(False)
        said, loop = b"", asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_START_S):
                while said != READY and (part := await loop.sock_recv(control, 1 << 16)):
                    said += part
            problem = said.decode() or "its process ended"
        except TimeoutError:
            problem = f"its process did not start within {_START_S:g} s"
        if said != READY:
            self._host.kill()
            self._host.wait()
            line, _, trace = problem.partition("\n")
            fits = "a function that can be imported"
            raise ConfigError("environment.agent", line, fits, trace)
        control.setblocking(True)
        return control


async def _read(reader: asyncio.StreamReader) -> bytes:
    """Read a watcher's report of how its agent ended; empty if the watcher was killed."""
    try:
        return await reader.read()
    except ConnectionError:
        return b""
