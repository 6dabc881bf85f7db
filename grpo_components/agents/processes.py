"""Runs agents in processes of their own, with a deadline, from the server's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_components.agents.host import MARK
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
        self._socket: socket.socket | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._running: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._next = 0

    async def run(
        self,
        task: Mapping[str, Any],
        variables: Mapping[str, str],
        timeout_s: float,
        failure: asyncio.Future[str],
    ) -> Outcome:
        """Run an agent to its end; whatever happens, nothing of it is left."""
        await self._ensure_host()
        number, self._next = self._next, self._next + 1
        ended = self._running[number] = asyncio.get_running_loop().create_future()
        try:
            self._send({"session": number, "task": dict(task), "variables": dict(variables)})
            waiting: set[asyncio.Future[Any]] = {ended, failure}
            await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if failure.done():
                return Outcome(error=f"agent: {failure.result()}")
            if not ended.done():
                limit = f"{timeout_s:g} s, half of timeouts.rollout_s"
                return Outcome(error=f"agent: TimeoutError: {self._name} did not end in {limit}")
            return self._outcome(ended.result())
        finally:
            if not ended.done():
                self._send({"session": number})
                await asyncio.wait([ended], timeout=_KILL_S)
            self._running.pop(number, None)

    def close(self) -> None:
        """Kill all agents, and the process that starts them. Any thread may call this."""
        if self._host is not None and self._socket is not None:
            with contextlib.suppress(OSError):  # it has ended already
                self._socket.shutdown(socket.SHUT_RDWR)  # it ends its agents and itself
            try:
                self._host.wait(_KILL_S)
            except subprocess.TimeoutExpired:
                self._host.kill()
                self._host.wait()

    def _outcome(self, ended: Mapping[str, Any]) -> Outcome:
        if "lost" in ended:
            return Outcome(error=f"agent: {ended['lost']}")
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

    def _send(self, message: Mapping[str, Any]) -> None:
        if self._writer is not None:
            self._writer.write(json.dumps(message, default=str).encode() + b"\n")

    async def _ensure_host(self) -> None:
        async with self._starting:
            if self._host is None or self._host.poll() is not None:
                await self._start_host()

    async def _start_host(self) -> None:
        self._socket, theirs = socket.socketpair()
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
                MARK: secrets.token_hex(16),
                "PYTHONHASHSEED": "0",  # an agent may iterate over a set, and a replay again
                "NO_PROXY": no_proxy,
                "no_proxy": no_proxy,
            },
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        reader, self._writer = await asyncio.open_connection(sock=self._socket, limit=_MAX_LINE)
        problem: str | None = f"its process did not start within {_START_S:g} s"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_START_S):
                line = await reader.readline()
                problem = json.loads(line)["problem"] if line else "its process ended"
        if problem is not None:
            self._host.kill()
            self._host.wait()
            raise AgentImportError(problem)
        self._reading = asyncio.create_task(self._read(reader, self._writer))

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            answer = json.loads(line)
            ended = self._running.get(answer["session"])
            if ended is not None and not ended.done():
                ended.set_result(answer)
        for ended in self._running.values():
            if not ended.done():
                ended.set_result({"lost": "the process that starts agents ended"})
        writer.close()


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
