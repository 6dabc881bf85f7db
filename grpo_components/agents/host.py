"""The process that starts agents: imports the agent once, then forks a watcher for each session.

A session is the agent's work on one response. Its watcher forks the agent and adopts all processes
that the agent starts. It kills them when the agent has ended, or when the owner (the generator)
closes the session's connection or dies. If a watcher is killed, this process adopts the processes
that the watcher leaves, and kills them at its own end.
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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from grpo_components.agents.rewards import checked_reward
from grpo_components.objective.component_errors import failure_text

_PDEATHSIG, _SUBREAPER = 1, 36
READY = b"ready"
"""Sent to the owner once the agent is imported; if the import fails, the reason is sent."""
_MAX_SAID = 1 << 20
"""Maximum bytes kept of a function's result or a command's output; the last ones are kept."""
_libc = ctypes.CDLL(None)
_Agent = Callable[[Any], Any] | list[str]
"""A function that takes the task, or a command: program and arguments."""


def _serve(owner: socket.socket, agent: _Agent) -> None:
    """Fork a watcher for each connection that the owner sends, until the owner ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a watcher
    with contextlib.suppress(ConnectionError):
        while received := socket.recv_fds(owner, 1, 1)[1]:
            with socket.socket(fileno=received[0]) as connection:
                if os.fork() == 0:
                    owner.close()
                    _in_child(_watch, connection, agent)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _kill_children()


def _watch(connection: socket.socket, agent: _Agent) -> None:
    """Run an agent until it ends or the connection closes; kill its processes; report its end."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
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
    said, poll = b"", select.poll()
    for descriptor in (reading, connection.fileno(), os.pidfd_open(pid)):
        poll.register(descriptor, select.POLLIN)
    while {each for each, _ in poll.poll()} == {reading}:
        if not (part := _read(reading, agent)):
            poll.unregister(reading)  # closed by the agent, which may run on
        said = (said + part)[-_MAX_SAID:]
    os.kill(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    _kill_children()
    while part := _read(reading, agent):  # the rest, which nobody can write any more
        said = (said + part)[-_MAX_SAID:]
    with contextlib.suppress(OSError):  # the owner may have ended
        connection.sendall(json.dumps([status, said.decode("utf-8", "replace")]).encode())


def _read(reading: int, agent: _Agent) -> bytes:
    """Read more of a function's result or a command's output; also write the output to the log."""
    part = os.read(reading, _MAX_SAID)
    if isinstance(agent, list):
        os.write(2, part)
    return part


def _run(
    agent: _Agent, watcher: int, writing: int, task: dict[str, Any], variables: dict[str, str]
) -> None:
    os.setsid()
    _die_with(watcher)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ.update(variables)
    random.seed(task["seed"])
    if isinstance(agent, list):
        os.dup2(writing, 2)
        _become(agent, task)
    else:
        with os.fdopen(writing, "w") as result:
            json.dump(_result_of(agent, task), result)


def _in_child(work: Callable[..., None], *arguments: Any, **more: Any) -> None:
    """Call `work` in this process, which was just forked, and then end the process."""
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


def _kill_children() -> None:
    """Kill all children of this process, also those that it adopts when their parent is killed."""
    children = Path("/proc/self/task", str(os.getpid()), "children")
    while found := [int(pid) for pid in children.read_text().split()]:
        for pid in found:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _result_of(function: Callable[[Any], Any], task: dict[str, Any]) -> dict[str, Any]:
    """Run an agent's function; return its reward, or its error."""
    try:
        value = function(task)
        if inspect.iscoroutine(value):
            value = asyncio.run(value)
        return {"reward": checked_reward(value)}
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # an agent may raise anything
        return {"error": failure_text("agent", error)}


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


def main() -> None:
    """Import the agent, tell the owner the outcome, and start agents until the owner ends."""
    owner = socket.socket(fileno=int(sys.argv[1]))
    agent, parent = json.loads(sys.argv[2]), os.getppid()
    os.environ["PYTHONPATH"] = sys.argv[3]  # the owner's: an agent's Python may be another one
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner handles Ctrl-C
    _die_with(parent)  # while the agent's own code runs here, which may hang
    made = agent
    try:
        if isinstance(agent, str):
            module, _, name = agent.rpartition(".")
            made = getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        problem = failure_text(f"{agent} cannot be imported", error)
        owner.sendall(problem.encode(errors="replace"))
        return
    _libc.prctl(_PDEATHSIG, 0)  # from here on it ends when the owner's connection does
    _libc.prctl(_SUBREAPER, 1)
    gc.freeze()  # so that a forked process copies fewer pages
    owner.sendall(READY)
    _serve(owner, made)


if __name__ == "__main__":
    main()
