"""Removes a run's files from a node that has left the cluster, where nobody can ask for it.

One process per run and node, which is no child of Ray's: it outlives the roles. A run that ends
well ends it (`node_side.clear`).
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import select
import shutil
import subprocess
import sys
from pathlib import Path
from typing import IO

import psutil

from grpo_components.cluster.scratch import remove_scratch

LOCK = "lock"
"""File in a run's folder for temporary files, locked by each of its roles on the node."""
MIRROR = ".copy-of-a-run"
"""File in a folder that holds a node's part of a run's files; it has the run's name."""
_OWN = "janitor"
_GONE_S = 3600.0
"""Time between two looks that find no role of a run that has left, in seconds."""
_START_S = 60.0
_RAYLET = "raylet"


def start_janitor(scratch: Path, output_dir: str, without: str) -> None:
    """Start this node's janitor of a run, unless it has one."""
    parents = psutil.Process().parents()
    raylets = [process.pid for process in parents if process.name() == _RAYLET]
    if not raylets or _janitor(scratch):
        return
    command = [sys.executable, "-P", "-m", __name__, str(raylets[0]), str(scratch), output_dir]
    environment = {name: value for name, value in os.environ.items() if name != without}
    # It forks itself and returns: Ray ends the children of a role with it.
    subprocess.run(command, env=environment, check=True, timeout=_START_S, start_new_session=True)


def end_janitor(scratch: Path) -> None:
    """End this node's janitor of a run, if it has one."""
    if process := _janitor(scratch):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()


def _janitor(scratch: Path) -> psutil.Process | None:
    with contextlib.suppress(OSError, ValueError, psutil.Error):
        process = psutil.Process(int((scratch / _OWN).read_text(encoding="ascii")))
        if str(scratch) in process.cmdline():
            return process
    return None


def wait_and_remove(raylet: int, scratch: Path, output_dir: Path, gone_s: float = _GONE_S) -> None:
    """Wait until a run has left this node, then remove its files."""
    with contextlib.suppress(FileNotFoundError), (scratch / LOCK).open("rb") as lock:
        left = False
        while not left:
            fcntl.flock(lock, fcntl.LOCK_EX)  # waits for the end of all roles
            fcntl.flock(lock, fcntl.LOCK_UN)  # one that is restarted may come back
            left = _ends(raylet, gone_s) or _is_free(lock)
        fcntl.flock(lock, fcntl.LOCK_EX)
        mirror = output_dir / MIRROR
        if mirror.exists() and mirror.read_text(encoding="utf-8") == scratch.name:
            shutil.rmtree(output_dir, ignore_errors=True)
        remove_scratch(scratch)


def _ends(pid: int, timeout_s: float) -> bool:
    """Wait for a process to end; return whether it did."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process], [], [], timeout_s)[0])
    finally:
        os.close(process)


def _is_free(lock: IO[bytes]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def main(arguments: list[str] | None = None) -> int:
    """Become the janitor in a process of its own, and return."""
    parser = argparse.ArgumentParser(
        prog="python -m grpo_components.cluster.node_janitor", description=__doc__
    )
    parser.add_argument("raylet", type=int)
    parser.add_argument("scratch", type=Path)
    parser.add_argument("output_dir", type=Path)
    options = parser.parse_args(arguments)
    with (options.scratch / _OWN).open("a", encoding="ascii") as own:
        try:
            fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another role was faster
            return 0
        if os.fork():
            return 0
        own.truncate(0)
        own.write(str(os.getpid()))
        own.flush()
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(nothing, descriptor)  # a role's log would stay open
        os.chdir("/")
        wait_and_remove(options.raylet, options.scratch, options.output_dir)
    return 0


if __name__ == "__main__":
    sys.exit(main())
