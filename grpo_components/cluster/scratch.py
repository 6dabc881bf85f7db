"""Makes the folder of a run's temporary files, and removes it, also after runs that were killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import IO

_TMP, _SHM = Path("/tmp"), Path("/dev/shm")
_PREFIX, _LOCK = "grpo-", "lock"


def make_scratch(parent: Path = _TMP) -> tuple[Path, IO[bytes]]:
    """Make a folder; while the returned file is open, no other run removes it.

    Its path must be short: a Unix socket's has at most 107 bytes.
    """
    made = Path(tempfile.mkdtemp(dir=parent))
    lock = (made / _LOCK).open("wb")
    fcntl.flock(lock, fcntl.LOCK_EX)
    # Named only now: a sweep takes what it finds without a lock.
    folder = made.with_name(f"{_PREFIX}{os.getpid()}-{made.name.removeprefix('tmp')}")
    return made.rename(folder), lock


def remove_scratch(folder: Path, shared_memory: Path = _SHM) -> None:
    """Remove a run's folder, and what its roles left in shared memory.

    Semaphores bear the folder's name. Tensor-parallel workers of vLLM that were killed while they
    started leave memory that bears the name of a file in the folder.
    """
    names = [f"sem.{folder.name}", *(file.name for file in folder.glob("vllm_dist_*"))]
    for path in (path for name in names for path in shared_memory.glob(f"{name}-*")):
        path.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def sweep(parent: Path = _TMP, shared_memory: Path = _SHM) -> list[str]:
    """Remove the folders of this user's runs that were killed; return their names."""
    swept = []
    for lock in parent.glob(f"{_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError), lock.open("rb") as file:  # another's, or still in use
            if lock.stat().st_uid == os.getuid():
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_scratch(lock.parent, shared_memory)
                swept.append(lock.parent.name)
    return swept
