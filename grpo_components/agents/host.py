"""What the process does that starts agents: imports the agent once, then forks one per session.

The owner's messages and the answers are lines of JSON. If the owner ends, however it does, this
process kills all agents with all that they started. If this process is killed, another one does.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import importlib
import inspect
import json
import os
import random
import select
import selectors
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from grpo_components.agents.rewards import checked_reward
from grpo_components.objective.component_errors import failure_text

MARK = "GRPO_AGENTS"
"""Environment variable with a text that all agents of this process, and their programs, have."""
_PDEATHSIG, _SUBREAPER = 1, 36
_KILL_S = 10.0
"""Seconds until the kernel has ended a killed process."""
_MAX_LINE = 1 << 20
_MAX_ERROR_CHARS = 8000
_MAX_RESULT = 1 << 20
"""Bytes that an agent may send as its result; more, or others than its reward, fail its sample."""
_MAX_SAID = 1000
"""Bytes that are kept of the end of what a command says on its standard error."""
_libc = ctypes.CDLL(None)


class AgentHost:
    """Starts an agent for each session that the owner begins, and says how it ended."""

    def __init__(
        self, owner: socket.socket, function: Callable[[Any], Any] | None, command: list[str]
    ) -> None:
        self._owner, self._function, self._command = owner, function, command
        self._selector = selectors.DefaultSelector()
        self._running: dict[int, tuple[int, int, bytearray]] = {}
        """Number of a session -> its process, a descriptor of it, and what came through its pipe:
        the result of a function; the end of what a command said on its standard error."""
        self._keys: dict[int, str] = {}
        self._input = bytearray()

    def serve(self) -> None:
        """Serve the owner until it ends."""
        self._selector.register(self._owner, selectors.EVENT_READ, self._read_owner)
        try:
            while True:
                for key, _ in self._selector.select():
                    # One that ended was reported with its pipe, which may be in this list, too.
                    if self._selector.get_map().get(key.fileobj) is key:
                        key.data()
        except (EOFError, ConnectionError):
            return
        finally:
            for number, (pid, _, _) in self._running.items():
                self._end(number)
                os.waitpid(pid, 0)
                self._kill_escaped(self._keys[number])

    def _read_owner(self) -> None:
        received = self._owner.recv(_MAX_LINE)
        if not received:
            raise EOFError
        self._input += received
        while (end := self._input.find(b"\n")) >= 0:
            line, self._input = bytes(self._input[:end]), self._input[end + 1 :]
            message = json.loads(line)
            if "task" in message:
                self._start(message["session"], message["task"], message["variables"])
            elif message["session"] in self._running:
                self._end(message["session"])

    def _start(self, number: int, task: dict[str, Any], variables: dict[str, str]) -> None:
        reading, writing = os.pipe()
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            self._be_agent(parent, writing, task, variables)
        os.close(writing)
        os.set_blocking(reading, False)
        self._running[number] = (pid, os.pidfd_open(pid), bytearray())
        self._keys[number] = variables["OPENAI_API_KEY"]

        def read() -> None:
            with contextlib.suppress(BlockingIOError):
                # One part at a time: an agent may write without end.
                if part := os.read(reading, _MAX_LINE):
                    self._keep(self._running[number][2], part)
                    if len(self._running[number][2]) > _MAX_RESULT:
                        self._end(number)
                    return
                # Closed by the agent, which may run on: else the pipe would be ready all the time.
                with contextlib.suppress(KeyError):
                    self._selector.unregister(reading)

        def ended() -> None:
            self._selector.unregister(self._running[number][1])
            read()  # the rest: a pipe holds no more than a part
            with contextlib.suppress(KeyError):
                self._selector.unregister(reading)
            os.close(reading)
            self._report(number)

        self._selector.register(reading, selectors.EVENT_READ, read)
        self._selector.register(self._running[number][1], selectors.EVENT_READ, ended)

    def _keep(self, kept: bytearray, part: bytes) -> None:
        """Keep what came from an agent; what a command says is also for this process's log."""
        kept += part
        del kept[_MAX_RESULT + 1 :]
        if self._command:
            with contextlib.suppress(OSError):  # a full disk is no fault of the agent
                os.write(2, part)
            del kept[:-_MAX_SAID]

    def _end(self, number: int) -> None:
        """Kill an agent; `_report` follows once the kernel has ended it."""
        for kill in (os.kill, os.killpg):  # it may not have its group yet
            with contextlib.suppress(ProcessLookupError):
                kill(self._running[number][0], signal.SIGKILL)

    def _report(self, number: int) -> None:
        pid, descriptor, result = self._running[number]
        self._end(number)  # what it started; the process itself is not reaped yet
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.close(descriptor)
        del self._running[number]
        self._kill_escaped(self._keys.pop(number))
        what = "said" if self._command else "result"
        answer = {"session": number, "status": status, what: result.decode("utf-8", "replace")}
        self._owner.sendall(json.dumps(answer).encode() + b"\n")

    def _kill_escaped(self, key: str) -> None:
        """Kill what an ended agent started in process groups of its own.

        This process adopts such orphans. A program among them has the session's key in its
        environment.
        """
        own = {pid for pid, _, _ in self._running.values()}
        for pid in {pid for pid in _children() if pid not in own}:
            killed = False
            if _has(pid, f"OPENAI_API_KEY={key}".encode()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    killed = True
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0 if killed else os.WNOHANG)  # this takes a while

    def _be_agent(
        self, parent: int, writing: int, task: dict[str, Any], variables: dict[str, str]
    ) -> None:
        """Run the agent in this new process, and end it."""
        status = 1
        try:
            os.setsid()
            _die_with(parent)
            self._owner.close()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.environ.update(variables)
            random.seed(task["seed"])
            if self._command:
                os.dup2(writing, 2)
                _become(self._command, task)
            assert self._function is not None
            result = _result_of(self._function, task)
            while result:
                result = result[os.write(writing, result) :]
            status = 0
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)


def _result_of(function: Callable[[Any], Any], task: dict[str, Any]) -> bytes:
    """Run an agent's function; return its reward, or its error, as JSON."""
    try:
        value = function(task)
        if inspect.isawaitable(value):
            value = asyncio.run(_awaited(value))
        result: dict[str, Any] = {"reward": checked_reward(value)}
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # an agent may raise anything
        result = {"error": failure_text("agent", error)[:_MAX_ERROR_CHARS]}
    return json.dumps(result).encode()


async def _awaited(value: Any) -> Any:
    return await value


def _become(command: list[str], task: Mapping[str, Any]) -> None:
    """Replace this process by a program that reads the task from its standard input."""
    descriptor = os.memfd_create("task")
    os.write(descriptor, json.dumps(task).encode())
    os.lseek(descriptor, 0, os.SEEK_SET)
    os.dup2(descriptor, 0)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error}\n".encode())
        os._exit(127)


def _start_guard() -> None:
    """Start a process that kills what agents leave behind if this one is killed.

    Ray kills the children of a role when the driver is gone: this process, with its agents, but not
    what these have started.
    """
    host = os.pidfd_open(os.getpid())
    if os.fork():
        os.close(host)
        return
    os.setsid()
    os.dup2(host, 3)
    os.closerange(4, os.sysconf("SC_OPEN_MAX"))  # the owner must see that the connection ends
    select.select([3], [], [])
    mark = f"{MARK}={os.environ[MARK]}".encode()
    while found := [pid for pid in _processes() if _has(pid, mark)]:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                ended = os.pidfd_open(pid)
                os.kill(pid, signal.SIGKILL)
                select.select([ended], [], [], _KILL_S)
                os.close(ended)
    os._exit(0)


def _processes() -> list[int]:
    """Return all other processes."""
    found = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [pid for pid in found if pid != os.getpid()]


def _has(pid: int, variable: bytes) -> bool:
    """Whether a process was started with an environment variable; False if it has ended."""
    try:
        return variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def _children() -> list[int]:
    return [
        int(pid)
        for pid in Path("/proc/self/task", str(os.getpid()), "children").read_text().split()
    ]


def _die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent ends."""
    _libc.prctl(_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def imported(path: str) -> Callable[[Any], Any]:
    """Import an agent's function."""
    module, _, name = path.rpartition(".")
    found = getattr(importlib.import_module(module), name, None) if module else None
    if not callable(found):
        raise ValueError(f"{path} is no function")
    return found


def main() -> None:
    """Import the agent, say so, and serve the owner."""
    owner = socket.socket(fileno=int(sys.argv[1]))
    agent, parent = json.loads(sys.argv[2]), os.getppid()
    os.environ["PYTHONPATH"] = sys.argv[3]  # the owner's: an agent's Python may be another one
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner handles Ctrl-C
    _start_guard()
    _die_with(parent)  # while the agent's own code runs here, which may hang
    command = [] if isinstance(agent, str) else agent
    try:
        function = imported(agent) if isinstance(agent, str) else None
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        problem = failure_text(f"environment.agent: {agent} cannot be imported", error)
        owner.sendall(json.dumps({"problem": problem}).encode() + b"\n")
        return
    _libc.prctl(_PDEATHSIG, 0)  # from here on it ends its agents before itself
    _libc.prctl(_SUBREAPER, 1)
    if os.getppid() != parent:
        return
    gc.freeze()  # so that a forked process copies fewer pages
    owner.sendall(b'{"problem": null}\n')
    AgentHost(owner, function, command).serve()


if __name__ == "__main__":
    main()
