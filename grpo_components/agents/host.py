"""The process that starts agents: imports the agent once, then forks a watcher for each session.

A watcher forks the agent and adopts all that this starts. It kills them when the agent has ended,
and when the owner ends the session's connection, as its death does. What a killed watcher leaves
is adopted and killed here.
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
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from grpo_components.agents.rewards import checked_reward
from grpo_components.objective.component_errors import failure_text

_PDEATHSIG, _SUBREAPER = 1, 36
_MAX_PART = 1 << 20
_MAX_ERROR_CHARS = 8000
_MAX_RESULT = 1 << 20
"""Bytes that an agent may send as its result; more, or others than its reward, fail its sample."""
_MAX_SAID = 1000
"""Bytes that are kept of the end of what a command says on its standard error."""
_libc = ctypes.CDLL(None)


class _Agent(NamedTuple):
    function: Callable[[Any], Any] | None
    """None if the agent is a command."""
    command: list[str]


def _serve(owner: socket.socket, agent: _Agent) -> None:
    """Fork a watcher for each connection that the owner sends, until the owner ends."""
    watchers: dict[int, int] = {}
    poll = select.poll()
    poll.register(owner, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor in watchers:
                poll.unregister(descriptor)
                os.waitpid(watchers.pop(descriptor), 0)
                os.close(descriptor)
                _kill_children(watchers.values())
                continue
            received = list[int]()
            with contextlib.suppress(ConnectionError):
                _, received, _, _ = socket.recv_fds(owner, 1, 1)
            if not received:
                for watcher in watchers.values():  # their connections end, too
                    os.waitpid(watcher, 0)
                return _kill_children()
            with socket.socket(fileno=received[0]) as connection:
                if (watcher := os.fork()) == 0:
                    owner.close()
                    _in_child(_watch, connection, agent)
            watchers[pidfd := os.pidfd_open(watcher)] = watcher
            poll.register(pidfd, select.POLLIN)
            with contextlib.suppress(ConnectionError):
                owner.sendall(b"1")  # for the next one


def _watch(connection: socket.socket, agent: _Agent) -> None:
    """Run an agent until it or the connection ends, kill what is left, and say how it ended."""
    os.setsid()
    _libc.prctl(_SUBREAPER, 1)
    line = connection.makefile("rb").readline()
    if not line.endswith(b"\n"):
        return  # the owner has ended
    (reading, writing), watcher = os.pipe(), os.getpid()
    if (pid := os.fork()) == 0:
        connection.close()
        os.close(reading)
        _in_child(_run, agent, watcher, writing, **json.loads(line))
    os.close(writing)
    kept, poll = bytearray(), select.poll()
    for descriptor in (reading, connection.fileno(), os.pidfd_open(pid)):
        poll.register(descriptor, select.POLLIN)
    while len(kept) <= _MAX_RESULT and {each for each, _ in poll.poll()} == {reading}:
        if not _keep(kept, reading, agent.command):
            poll.unregister(reading)  # closed by the agent, which may run on
    os.kill(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    _kill_children()
    while _keep(kept, reading, agent.command):  # the rest, which nobody can write any more
        pass
    what, text = "said" if agent.command else "result", kept.decode("utf-8", "replace")
    with contextlib.suppress(OSError):  # the owner may have ended
        connection.sendall(json.dumps({"status": status, what: text}).encode() + b"\n")


def _keep(kept: bytearray, reading: int, command: list[str]) -> bytes:
    """Read a part of an agent's result, or of what a command says, which is for the log, too."""
    part = os.read(reading, _MAX_PART)
    kept += part
    del kept[_MAX_RESULT + 1 :]
    if command:
        with contextlib.suppress(OSError):  # a full disk is no fault of the agent
            os.write(2, part)
        del kept[:-_MAX_SAID]
    return part


def _run(
    agent: _Agent, watcher: int, writing: int, task: dict[str, Any], variables: dict[str, str]
) -> None:
    """Run an agent in its own process."""
    os.setsid()
    _die_with(watcher)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ.update(variables)
    random.seed(task["seed"])
    if agent.function is None:
        os.dup2(writing, 2)
        _become(agent.command, task)
        return
    result = _result_of(agent.function, task)
    while result:
        result = result[os.write(writing, result) :]


def _in_child(work: Callable[..., None], *arguments: Any, **more: Any) -> None:
    """Do the work of a forked process, and end it."""
    status = 1
    try:
        work(*arguments, **more)
        status = 0
    except Exception:  # into the log, as in any process
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _kill_children(spared: Collection[int] = ()) -> None:
    """Kill all children but some; what these leave behind becomes a child, and is killed, too."""
    children = Path("/proc/self/task", str(os.getpid()), "children")
    while found := {int(pid) for pid in children.read_text().split()}.difference(spared):
        for pid in found:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


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


def _die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent ends."""
    _libc.prctl(_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def imported(path: str) -> Callable[[Any], Any]:
    """Import an agent's function by its dotted path; raise a ValueError if it is none."""
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
    _die_with(parent)  # while the agent's own code runs here, which may hang
    try:
        made = _Agent(imported(agent), []) if isinstance(agent, str) else _Agent(None, agent)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        problem = failure_text(f"environment.agent: {agent} cannot be imported", error)
        owner.sendall(json.dumps({"problem": problem}).encode() + b"\n")
        return
    _libc.prctl(_PDEATHSIG, 0)  # from here on it ends when the owner's connection does
    _libc.prctl(_SUBREAPER, 1)
    gc.freeze()  # so that a forked process copies fewer pages
    owner.sendall(b'{"problem": null}\n')
    _serve(owner, made)


if __name__ == "__main__":
    main()
