"""The lock of a run's folder: one living process at most writes there, and says who it is."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import stat
import tempfile
import threading
import time
import weakref
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import NoReturn

from grpo_components.errors import fail

LOCK = "run.lock"
"""In the folder of a run, while a process has it."""
HEARTBEAT_S = 10.0
"""Between two signs of life of the process that has a folder."""
SILENT_S = 60.0
"""Without a sign of life, after which a process of another host counts as dead."""
TIME = "%Y-%m-%d %H:%M:%S %z"
"""Of a holder's `started`."""
_BLOCKED_S = 2.0
"""How long a lock may be held by a process that cannot be named, in seconds."""
_RETRY_S = 0.05
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)
_RECORD_BYTES = 1024
"""Every record has this length, so that one write leaves no part of the record before it."""
_MAX_PATH_CHARS = 100


@dataclass(frozen=True)
class Holder:
    """The process that has a folder, as it wrote itself down."""

    pid: int
    host: str
    started: str
    """Local date and time with the offset from UTC."""
    boot: str
    """The kernel's id of the boot: the same in all containers of one machine."""
    pid_namespace: str
    """That `pid` counts in."""
    start_ticks: int
    """When the process started, in clock ticks since the boot: a pid is used again, this is not."""

    def is_here(self) -> bool:
        """Whether its pid can be looked up by this process."""
        here = (_boot(), _pid_namespace())
        return (self.boot, self.pid_namespace) == here

    def lives(self) -> bool:
        """Whether the process that `is_here` still runs."""
        return _start_ticks(self.pid) == self.start_ticks


class FolderLock:
    """The lock that this process has; it ends with the process, or with `release`.

    Args:
        folder: that is locked, without symbolic links.
        descriptor: of the lock file; closed by `release`.
        atomic: whether the file system has locks; if not, only what is written in the file counts.
        died: who had the folder before, and did not release it; None where nobody did.
    """

    def __init__(self, folder: Path, descriptor: int, atomic: bool, died: Holder | None) -> None:
        self.folder, self.atomic, self.died = folder, atomic, died
        self._descriptor = descriptor
        stop = threading.Event()
        beat = threading.Thread(
            target=_beat, args=(descriptor, stop), name=f"beat of {folder}", daemon=True
        )
        beat.start()
        self.release = weakref.finalize(
            self, _release, folder / LOCK, descriptor, stop, beat, os.getpid()
        )
        """Let others have the folder; the second call does nothing."""

    def verify(self) -> None:
        """Check that the folder is still this run's.

        Raises:
            OSError: if it was moved, removed or replaced while the run went on.
        """
        if not _is_at(self._descriptor, self.folder / LOCK):
            problem = "is no longer the folder of this run: it was moved, removed or replaced"
            raise OSError(errno.ESTALE, problem, str(self.folder))


def lock_folder(folder: Path) -> FolderLock:
    """Take a folder for this process; it is made where it is missing.

    The lock is flock(2) on a file in the folder, which the kernel ends with the process. Where
    another host wrote the file, its modification time has to be older than `SILENT_S`, too, since
    not every network file system shows the locks of other hosts.

    Args:
        folder: without symbolic links.

    Raises:
        ValueError: naming output_dir and the process that has the folder, or why there is no lock.
    """
    give_up = time.monotonic() + _BLOCKED_S
    while True:
        try:
            descriptor = _open(folder)
        except OSError as error:
            problem = f"{short(folder)} cannot be written to: {error.strerror}"
            fail("output_dir", problem, "a folder to write to")
        if descriptor is None:  # the folder was moved aside meanwhile
            continue
        try:
            lock = _try_lock(folder, descriptor, last=time.monotonic() > give_up)
        except BaseException:
            os.close(descriptor)
            raise
        if lock is not None:
            return lock
        os.close(descriptor)
        # Its holder starts or ends right now; what it has written of itself does not help yet.
        threading.Event().wait(_RETRY_S)


def refuse_folder_in_use(folder: Path) -> None:
    """Refuse a folder that a process of this machine has; touches nothing.

    `lock_folder` is what decides. This is for a config to be refused before anything is loaded.

    Args:
        folder: without symbolic links; may be missing.

    Raises:
        ValueError: naming output_dir and the process.
    """
    holder = read_holder(folder)
    if holder is not None and holder.is_here() and holder.lives():
        _refuse(folder, holder)


def read_holder(folder: Path) -> Holder | None:
    """Who has a folder or had it when it died; None where no process of ours wrote that down."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        return _parse(os.pread(descriptor, _RECORD_BYTES, 0))
    except OSError:  # not a file
        return None
    finally:
        os.close(descriptor)


def is_lock(path: Path) -> bool:
    """Whether a file is a lock of ours; an empty one was left by a process killed early."""
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            return False
        with path.open("rb") as file:
            written = file.read(_RECORD_BYTES + 1)
    except OSError:
        return False
    return len(written) <= _RECORD_BYTES and (
        not written.strip(b"\0") or _parse(written) is not None
    )


def short(path: Path) -> str:
    """A path for a message of one line: the end of one that is very long."""
    text = str(path)
    return text if len(text) <= _MAX_PATH_CHARS else f"...{text[3 - _MAX_PATH_CHARS :]}"


def _open(folder: Path) -> int | None:
    folder.mkdir(parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        return os.open(folder / LOCK, flags, 0o644)
    except FileNotFoundError:
        return None


def _try_lock(folder: Path, descriptor: int, last: bool) -> FolderLock | None:
    """The lock; None where it has to be tried again.

    Args:
        folder: to be locked.
        descriptor: of its lock file, open.
        last: whether a holder is refused that cannot be found.
    """
    atomic = True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = _parse(os.pread(descriptor, _RECORD_BYTES, 0))
        if holder is not None and (holder.lives() if holder.is_here() else True):
            _refuse(folder, holder)
        if last:
            _refuse(folder, holder, "a process left by ")
        return None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        atomic = False
    if not _is_at(descriptor, folder / LOCK):  # moved aside before it was locked
        return None
    if not is_lock(folder / LOCK):
        fail("output_dir", f"{short(folder)} holds {LOCK}, which no run wrote", "another folder")
    holder = _parse(os.pread(descriptor, _RECORD_BYTES, 0))
    if holder is not None and _blocks(folder, descriptor, holder, atomic):
        _refuse(folder, holder)
    os.pwrite(descriptor, json.dumps(asdict(_this_process())).encode().ljust(_RECORD_BYTES), 0)
    return FolderLock(folder, descriptor, atomic, holder)


def _blocks(folder: Path, descriptor: int, holder: Holder, atomic: bool) -> bool:
    """Whether a holder may live, although its lock was to be had or there are no locks."""
    if holder.boot == _boot() and (atomic or holder.is_here()):
        return not atomic and holder.lives()  # this kernel knows every lock of its processes
    with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{LOCK}.") as probe:
        now = os.fstat(probe.fileno()).st_mtime  # by the clock of whoever keeps the files
    return now - os.fstat(descriptor).st_mtime < SILENT_S


def _refuse(folder: Path, holder: Holder | None, who: str = "") -> NoReturn:
    named = f"pid {holder.pid} on {holder.host}, started {holder.started}" if holder else ""
    problem = f"{short(folder)} is in use by {who}{named or 'another process'}"
    fail("output_dir", problem, "another folder, or this one once that run has ended")


def _parse(written: bytes) -> Holder | None:
    try:
        holder = Holder(**json.loads(written))
    except (ValueError, TypeError, RecursionError):
        return None
    kinds = {"pid": int, "start_ticks": int}
    sound = all(type(value) is kinds.get(key, str) for key, value in asdict(holder).items())
    return holder if sound and _is_time(holder.started) else None


def _is_time(text: str) -> bool:
    try:
        return bool(datetime.strptime(text, TIME))
    except ValueError:
        return False


def _this_process() -> Holder:
    pid, started = os.getpid(), time.strftime(TIME)
    ticks = _start_ticks(pid)
    assert ticks is not None, "this process runs"
    return Holder(pid, socket.gethostname()[:64], started, _boot(), _pid_namespace(), ticks)


def _start_ticks(pid: int) -> int | None:
    """When a process started, in ticks since the boot; None where none runs with this pid."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    state, *fields = text.rpartition(")")[2].split()  # its name may have blanks and brackets
    return None if state in "ZX" else int(fields[18])


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _pid_namespace() -> str:
    return os.readlink("/proc/self/ns/pid")


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is still what a path names."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def _beat(descriptor: int, stop: threading.Event) -> None:
    while not stop.wait(HEARTBEAT_S):
        with contextlib.suppress(OSError):  # the file was removed, or its server is away
            os.utime(descriptor)


def _release(
    path: Path, descriptor: int, stop: threading.Event, beat: threading.Thread, owner: int
) -> None:
    if os.getpid() != owner:  # a fork of the process, which has a copy of the lock
        return
    stop.set()
    beat.join()
    try:
        if _is_at(descriptor, path):
            path.unlink()
    finally:
        os.close(descriptor)
