"""Runs agents in processes of their own, with a deadline, from the server's event loop."""

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

from grpo_components.agents.rewards import checked_reward

_START_S = 120.0
"""Seconds for the agent's module to be imported."""
_KILL_S = 20.0
"""Seconds until the kernel has ended a killed agent."""
_MAX_LINE = 1 << 24
"""Bytes of an answer: those of a result (`host._MAX_RESULT`), each up to six in JSON."""


class AgentImportError(RuntimeError):
    """The agent cannot be imported; no sample is to blame."""


@dataclass(frozen=True)
class Outcome:
    """How an agent ended."""

    reward: dict[str, float] | None = None
    """Rewards that it returned, by name."""
    error: str | None = None
    """Why its sample has failed; None if it ended well."""


class AgentProcesses:
    """Starts an agent for each session, through a process that has imported it already."""

    def __init__(self, agent: str | list[str]) -> None:
        self._agent = agent
        self._name = agent if isinstance(agent, str) else " ".join(agent)
        self._starting = asyncio.Lock()
        self._host: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._sessions: set[socket.socket] = set()
        """Connections to the watchers of agents."""

    async def run(
        self,
        task: Mapping[str, Any],
        variables: Mapping[str, str],
        timeout_s: float,
        failure: asyncio.Future[str],
    ) -> Outcome:
        """Run an agent to its end; whatever happens, nothing of it is left."""
        ours, theirs = socket.socketpair()
        with theirs:
            await self._start_watcher(theirs)
        reader, writer = await asyncio.open_connection(sock=ours, limit=_MAX_LINE)
        self._sessions.add(ours)
        message = {"task": dict(task), "variables": dict(variables)}
        writer.write(json.dumps(message, default=str).encode() + b"\n")
        report = asyncio.create_task(_line(reader))
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
            writer.write_eof()  # it kills what is left
            await asyncio.wait([report], timeout=_KILL_S)
            report.cancel()
            self._sessions.discard(ours)
            writer.close()

    def close(self) -> None:
        """Kill all agents, and the process that starts them. Any thread may call this."""
        for connection in [*self._sessions, *filter(None, [self._control])]:
            with contextlib.suppress(OSError):  # it has ended already
                connection.shutdown(socket.SHUT_RDWR)
        if self._host is not None:
            try:
                self._host.wait(_KILL_S)
            except subprocess.TimeoutExpired:
                self._host.kill()
                self._host.wait()

    def _outcome(self, line: bytes) -> Outcome:
        if not line.endswith(b"\n"):
            return Outcome(error="agent: the process that watches it was killed")
        ended = json.loads(line)
        status = ended["status"]
        if text := ended.get("result"):
            return _result(text)
        if status < 0:
            how = f"was killed by {signal.Signals(-status).name}"
        else:
            how = f"ended with status {status}"
        if status == 0 and not isinstance(self._agent, str):
            return Outcome()
        said = ended.get("said", "").strip()
        before, _, last = said.rpartition("\n")
        how += f": {last}" if last else ""
        return Outcome(error=f"agent: {self._name} {how}" + (f"\n{said}" if before else ""))

    async def _start_watcher(self, connection: socket.socket) -> None:
        """Start the process that will run an agent and report through a connection."""
        async with self._starting:  # one at a time: a socket holds few descriptors
            if self._control is None or self._host is None or self._host.poll() is not None:
                self._control = await self._start_host()
            # If the host has just ended, the connection ends, too; if it hangs, the agent is late.
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(_KILL_S):
                    socket.send_fds(self._control, [b"1"], [connection.fileno()])
                    await asyncio.get_running_loop().sock_recv(self._control, 1)

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
                "PYTHONHASHSEED": "0",  # an agent may iterate over a set, and a replay again
                "NO_PROXY": no_proxy,
                "no_proxy": no_proxy,
            },
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        control.setblocking(False)
        problem: str | None = f"its process did not start within {_START_S:g} s"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_START_S):
                line, loop = b"", asyncio.get_running_loop()
                while not line.endswith(b"\n"):
                    part = await loop.sock_recv(control, _MAX_LINE)
                    line += part or b'{"problem": "its process ended"}\n'
                problem = json.loads(line)["problem"]
        if problem is not None:
            self._host.kill()
            self._host.wait()
            raise AgentImportError(problem)
        return control


async def _line(reader: asyncio.StreamReader) -> bytes:
    """Read how an agent ended; no whole line if its watcher was killed."""
    try:
        return await reader.readline()
    except ConnectionError:
        return b""


def _result(text: str) -> Outcome:
    """Read what came through an agent's pipe, into which it may write what it likes."""
    try:
        result = json.loads(text)
        reward, error = result.get("reward"), result.get("error")
        if result.keys() <= {"reward", "error"} and isinstance(error, str | None):
            return Outcome(checked_reward(reward), error)
    except (ValueError, RecursionError, AttributeError):
        pass
    problem = f"its result of {len(text)} characters is not the one of its function"
    return Outcome(error=f"agent: {problem}, or too large: {text!r:.100}")
