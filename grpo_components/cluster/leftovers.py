"""Makes the temporary folder of a run, and removes what killed runs left in such places."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Any

import psutil

_TMP, _SHM = Path("/tmp"), Path("/dev/shm")
_NAME = re.compile(r"grpo-(\d+)-(?:n([0-9a-f]+)_)?\w+")
"""Name of such a folder: pid of the run's driver, its PID namespace, and a random part."""
_OWNER = "owner.json"
"""File in the folder that identifies the driver: a pid may be used again."""


def make_temp_dir(parent: Path = _TMP) -> Path:
    """Make the temporary folder of this process's run."""
    prefix = f"grpo-{os.getpid()}-n{_pid_namespace():x}_"
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    (folder / _OWNER).write_text(json.dumps(_identity(os.getpid())), encoding="utf-8")
    return folder


def remove_temp_dir(folder: Path, shared_memory: Path = _SHM) -> None:
    """Remove a run's temporary folder, and what its roles left in shared memory.

    Semaphores bear the folder's name. Tensor-parallel workers of vLLM that were killed while they
    started leave memory that bears the name of a file in the folder.
    """
    names = [f"sem.{folder.name}", *(file.name for file in folder.glob("vllm_dist_*"))]
    for path in (path for name in names for path in shared_memory.glob(f"{name}-*")):
        with contextlib.suppress(OSError):
            path.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def sweep(parent: Path = _TMP, shared_memory: Path = _SHM) -> list[str]:
    """Remove what runs of this user left behind whose driver no longer exists.

    Left alone are files of other users, and of drivers in another PID namespace: their pids cannot
    be looked up here.
    """
    removed: dict[str, None] = {}
    for folder in sorted(parent.glob("grpo-*")):
        name = _NAME.fullmatch(folder.name)
        if name and _is_mine(folder, stat.S_ISDIR) and _has_died(name, _owner(folder)):
            remove_temp_dir(folder, shared_memory)
            if not os.path.lexists(folder):
                removed[folder.name] = None
    for semaphore in sorted(shared_memory.glob("sem.grpo-*")):
        run, _, _ = semaphore.name.removeprefix("sem.").rpartition("-")
        name = _NAME.fullmatch(run)
        if name and _is_mine(semaphore, stat.S_ISREG) and _has_died(name, _owner(parent / run)):
            with contextlib.suppress(OSError):
                semaphore.unlink()
                removed[run] = None
    return list(removed)


def _is_mine(path: Path, is_kind: Any) -> bool:
    """Whether a path is of this user, and of a kind; links are not followed."""
    try:
        found = path.lstat()
    except OSError:  # another run just removed it
        return False
    return found.st_uid == os.getuid() and is_kind(found.st_mode)


def _has_died(name: re.Match[str], owner: dict[str, Any]) -> bool:
    """Whether the driver of a run has ended; False if that cannot be known here."""
    pid, namespace = int(name[1]), name[2]
    if namespace is not None and int(namespace, 16) != _pid_namespace():
        return False
    found = _identity(pid)
    reused = bool(found) and owner.get("pid") == pid and owner != found
    return found is None or reused


def _owner(folder: Path) -> dict[str, Any]:
    """Return the driver recorded in a run's folder; empty without a valid record."""
    try:
        owner = json.loads((folder / _OWNER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return owner if isinstance(owner, dict) else {}


def _identity(pid: int) -> dict[str, Any] | None:
    """Identify a living process by what no other process has; None if none lives with this pid."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None if not psutil.pid_exists(pid) else {}
    state, *fields = text.rpartition(")")[2].split()  # a name may contain blanks and ")"
    if state in "ZX":
        return None
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return {"pid": pid, "start_ticks": int(fields[18]), "boot": boot}


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino
