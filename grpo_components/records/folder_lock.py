"""Locks a run's folder, so that only one process writes to it; a lock file names that process."""

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
"""Name of the lock file, which is in a run's folder while a process holds that folder."""
HEARTBEAT_S = 10.0
"""Seconds between two updates of the lock file's modification time by its holder."""
SILENT_S = 60.0
"""Seconds without such an update after which a holder on another host counts as dead."""
TIME = "%Y-%m-%d %H:%M:%S %z"
"""Format of `Holder.started`."""
_BLOCKED_S = 2.0
"""Longest time, in seconds, to retry while the holder of a lock is not yet in its file."""
_RETRY_S = 0.05
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)
_RECORD_BYTES = 1024
"""Fixed length of the lock file's record, so that one write replaces an earlier one completely."""
_MAX_PATH_CHARS = 100


@dataclass(frozen=True)
class Holder:
    """The process that holds a folder, as recorded in the lock file."""

    pid: int
    host: str
    started: str
    """When it locked the folder: local date and time, with the offset from UTC."""
    boot: str
    """The kernel's boot id, the same in all containers of a machine."""
    pid_namespace: str
    """PID namespace in which `pid` is valid."""
    start_ticks: int
    """Start of the process, in clock ticks since boot; tells apart processes that reuse a pid."""

    def is_here(self) -> bool:
        """Whether the calling process can look up `pid`: both share boot and PID namespace."""
        here = (_boot(), _pid_namespace())
        return (self.boot, self.pid_namespace) == here

    def is_alive(self) -> bool:
        """Whether the holder still runs; valid only if `is_here` is true."""
        return _start_ticks(self.pid) == self.start_ticks


class FolderLock:
    """A lock that this process holds on a folder, until `release` or the end of the process."""

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
        """Release the folder; a second call does nothing."""

    def verify(self) -> None:
        """Check that the folder still belongs to this run."""
        if not _is_at(self._descriptor, self.folder / LOCK):
            problem = "no longer belongs to this run: it was moved, removed or replaced"
            raise OSError(errno.ESTALE, problem, str(self.folder))


def lock_folder(folder: Path) -> FolderLock:
    """Lock a folder for this process; create the folder if it is missing.

    The lock is flock(2) on a file in the folder; the kernel releases it when the process ends.
    Some network file systems do not share locks between hosts: a lock file written by another host
    is taken over only if it has not been updated for `SILENT_S`.
    """
    give_up = time.monotonic() + _BLOCKED_S
    while True:
        try:
            descriptor = _open(folder)
        except OSError as error:
            problem = f"{short(folder)} cannot be written to: {error.strerror}"
            fail("output_dir", problem, "a writable folder")
        if descriptor is None:  # another process just moved the folder aside
            continue
        try:
            lock = _try_lock(folder, descriptor, last=time.monotonic() > give_up)
        except BaseException:
            os.close(descriptor)
            raise
        if lock is not None:
            return lock
        os.close(descriptor)
        # The holder is just starting or ending, so that the file does not name it.
        threading.Event().wait(_RETRY_S)


def refuse_folder_in_use(folder: Path) -> None:
    """Refuse a folder that a process of this machine holds; changes nothing.

    This is an early check, before anything is loaded; `lock_folder` checks again and decides.
    """
    holder = read_holder(folder)
    if holder is not None and holder.is_here() and holder.is_alive():
        _refuse(folder, holder)


def read_holder(folder: Path) -> Holder | None:
    """Return the recorded holder of a folder, alive or dead; None without a valid record."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        return _parse(os.pread(descriptor, _RECORD_BYTES, 0))
    except OSError:  # not a regular file
        return None
    finally:
        os.close(descriptor)


def is_lock(path: Path) -> bool:
    """Whether a file is a run's lock file; an empty one counts: its process was killed early."""
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
    """Return a path as text for a message; only the end of a very long path."""
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
    """Try once to lock the folder."""
    atomic = True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = _parse(os.pread(descriptor, _RECORD_BYTES, 0))
        if holder is not None and (holder.is_alive() if holder.is_here() else True):
            _refuse(folder, holder)
        if last:
            _refuse(folder, holder, "a child process of ")
        return None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        atomic = False
    if not _is_at(descriptor, folder / LOCK):  # moved aside before it was locked
        return None
    if not is_lock(folder / LOCK):
        problem = f"{short(folder)} contains {LOCK}, which was not written by a run"
        fail("output_dir", problem, "another folder")
    holder = _parse(os.pread(descriptor, _RECORD_BYTES, 0))
    if holder is not None and _blocks(folder, descriptor, holder, atomic):
        _refuse(folder, holder)
    os.pwrite(descriptor, json.dumps(asdict(_this_process())).encode().ljust(_RECORD_BYTES), 0)
    return FolderLock(folder, descriptor, atomic, holder)


def _blocks(folder: Path, descriptor: int, holder: Holder, atomic: bool) -> bool:
    """Whether the recorded holder may be alive although this process could take the lock."""
    if holder.boot == _boot() and (atomic or holder.is_here()):
        return not atomic and holder.is_alive()  # if atomic, this kernel found no other lock
    with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{LOCK}.") as probe:
        now = os.fstat(probe.fileno()).st_mtime  # by the file server's clock
    return now - os.fstat(descriptor).st_mtime < SILENT_S


def _refuse(folder: Path, holder: Holder | None, who: str = "") -> NoReturn:
    named = f"pid {holder.pid} on {holder.host}, started {holder.started}" if holder else ""
    problem = f"{short(folder)} is in use by {who}{named or 'another process'}"
    fail("output_dir", problem, "another folder, or this one after that run has ended")


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
    """Return when a process started, in clock ticks since boot; None if none runs with this pid."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    state, *fields = text.rpartition(")")[2].split()  # the process name may contain blanks and ")"
    return None if state in "ZX" else int(fields[18])


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _pid_namespace() -> str:
    return os.readlink("/proc/self/ns/pid")


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether a path still leads to the file that is open as `descriptor`."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def _beat(descriptor: int, stop: threading.Event) -> None:
    while not stop.wait(HEARTBEAT_S):
        with contextlib.suppress(OSError):  # the file was removed, or its server is unreachable
            os.utime(descriptor)


def _release(
    path: Path, descriptor: int, stop: threading.Event, beat: threading.Thread, owner: int
) -> None:
    if os.getpid() != owner:  # a fork of the holder has a copy of this object
        return
    stop.set()
    beat.join()
    try:
        if _is_at(descriptor, path):
            path.unlink()
    finally:
        os.close(descriptor)
