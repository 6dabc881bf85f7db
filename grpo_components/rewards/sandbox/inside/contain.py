"""Script that the code sandbox starts: builds the sandbox, then runs the program once per request.

It uses three processes. The first enters new namespaces. The second is process 1 of the new PID
namespace: it builds the file system, and for each run forks the third, which gives up all
privileges and becomes the program. When process 1 ends, the kernel kills everything left in its
namespace.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import glob
import json
import os
import resource
import signal
import site
import stat
import struct
import sys
import sysconfig
import threading
import types
from collections.abc import Callable
from typing import Any, NoReturn

_CLONE_NEWNS, _CLONE_NEWCGROUP, _CLONE_NEWUTS = 0x20000, 0x2000000, 0x4000000
_CLONE_NEWIPC, _CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = (1 << n for n in (27, 28, 29, 30))
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT, _MS_BIND = 1, 2, 4, 8, 32, 4096
_MS_REC, _MS_PRIVATE = 16384, 1 << 18
_MNT_DETACH = 2
_AT_FDCWD, _AT_RECURSIVE, _MOUNT_SETATTR = -100, 0x8000, 442
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_NOBODY = 65534
_FIRST_UID = 1_000_000_000
"""Lowest user id of programs if root runs the sandbox. Each has its own: limits are per user id."""
CPU_LIMIT_STATUS = 128 + signal.SIGXCPU
_CAPABILITY_VERSION = 0x20080522
_MOUNT_POINT = "/sys"
"""Folder in which the new root is built: exists on every machine and contains no Python."""
_DEVICES = ("null", "zero", "random", "urandom")

_AUDIT_ARCH_X86_64 = 0xC000003E
_CLONE, _CLONE3, _CLONE_THREAD = 56, 435, 0x10000
_EPERM, _ENOSYS = 1, 38
# Numbers of x86-64 system calls, in groups: new processes (fork, vfork); namespaces and mounts;
# memory, limits and descriptors of other processes; the network and messages that carry
# descriptors; memory that no limit counts (asynchronous I/O included); rarely used kernel features.
_REFUSED = (57, 58)
_REFUSED += (155, 161, 165, 166, 272, 308, 428, 429, 430, 431, 432, 433, 442, 457, 458)
_REFUSED += (101, 303, 304, 310, 311, 312, 424, 434, 438, 440, 448)
_REFUSED += (41, 42, 43, 44, 46, 47, 49, 50, 288, 299, 307)
_REFUSED += (29, 30, 64, 68, 206, 207, 208, 209, 210, 240, 278, 319, 333, 447)
_REFUSED += (103, 135, 154, 163, 167, 168, 169, 172, 173, 175, 176, 179, 212, 246, 248, 249, 250)
_REFUSED += (298, 300, 313, 320, 321, 323, 425, 426, 427, 443, 459, 460, 461)
_FIRST_UNKNOWN = 462
"""System calls from this number on fail with ENOSYS, as they would on an older kernel."""

_libc = ctypes.CDLL(None, use_errno=True)
_fopen = _libc.fopen
_fopen.restype = ctypes.c_void_p


def _must(result: int, what: str) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    arguments = [text.encode() for text in (source, target, kind)]
    done = _libc.mount(*arguments, ctypes.c_ulong(flags), options.encode())
    _must(done, f"mount {source} {target}")


def _read_only(target: str, also: int) -> None:
    # Add attributes to this mount and all mounts below it, and remove none.
    attributes = struct.pack("QQQQ", _MS_RDONLY | _MS_NOSUID | also, 0, 0, 0)
    path = target.encode()
    done = _libc.syscall(_MOUNT_SETATTR, _AT_FDCWD, path, _AT_RECURSIVE, attributes, 32)
    _must(done, f"mount_setattr {target}")


def _bind(source: str, place: str = "") -> None:
    target = _MOUNT_POINT + (place or source)
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    elif not os.path.exists(target):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    _mount(source, target, "", _MS_BIND | _MS_REC)
    # A device in a read-only bind mount can still be written to, but its mode and owner are fixed.
    _read_only(target, _MS_NOEXEC if source.startswith("/dev/") else _MS_NODEV)


def _build_root(files: dict[str, str], packages: dict[str, str]) -> None:
    """Build and enter a root folder with shared libraries, Python, the packages, files and /tmp."""
    _mount("none", "/", "", _MS_REC | _MS_PRIVATE)
    _mount("tmpfs", _MOUNT_POINT, "tmpfs", _MS_NOSUID, "mode=755")
    folders = [f"{sys.base_prefix}/lib", f"{sys.base_prefix}/lib64"]
    folders += [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]
    folders += ["/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/share/zoneinfo"]
    bound: list[str] = []
    for folder in folders:
        if os.path.islink(folder):  # such as /lib, a link to usr/lib, which is also bound
            os.makedirs(os.path.dirname(_MOUNT_POINT + folder), exist_ok=True)
            os.symlink(os.readlink(folder), _MOUNT_POINT + folder)
        elif os.path.isdir(folder) and not any(f"{folder}/".startswith(f"{b}/") for b in bound):
            _bind(folder)
            bound.append(folder)
    for name in ["/etc/ld.so.cache", *(f"/dev/{device}" for device in _DEVICES)]:
        if os.path.exists(name) and not any(name.startswith(f"{b}/") for b in bound):
            _bind(name)
    for folder in bound:  # hide installed packages: they may be private
        ours = _MOUNT_POINT + folder
        for kind in ("site-packages", "dist-packages"):
            for hidden in [*glob.glob(f"{ours}/python*/{kind}"), *glob.glob(f"{ours}/{kind}")]:
                _mount("tmpfs", hidden, "tmpfs", _MS_RDONLY | _MS_NOSUID | _MS_NODEV, "size=4k")
    for place, source in packages.items():
        _bind(source, place)
    for name, text in files.items():
        with open(f"{_MOUNT_POINT}/{name}", "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
    os.mkdir(f"{_MOUNT_POINT}/tmp")
    os.chdir(_MOUNT_POINT)
    _must(_libc.pivot_root(b".", b"."), "pivot_root")
    _must(_libc.umount2(b".", _MNT_DETACH), "umount of the old root")


def _renew(file_bytes: int) -> None:
    """Give the next run an empty /tmp and its own /dev/stdin; the rest is read-only."""
    _libc.umount2(b"/tmp", _MNT_DETACH)
    options = f"size={file_bytes},nr_inodes=1024,mode=1777"
    _mount("tmpfs", "/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, options)
    if stat.S_ISREG(os.fstat(0).st_mode):
        _mount("none", "/", "", _MS_REMOUNT | _MS_BIND | _MS_NOSUID)
        with open("/dev/stdin", "wb") as file:
            os.sendfile(file.fileno(), 0, 0, os.fstat(0).st_size)
    _mount("none", "/", "", _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID)


def _filter_system_calls() -> None:
    """Make the kernel refuse `_REFUSED` and new processes with EPERM, but allow new threads."""
    load, equal, bits, answer = 0x20, 0x15, 0x45, 0x06
    at_number, at_arch, at_first_argument = 0, 4, 16
    allow, kill, refuse = 0x7FFF0000, 0x80000000, 0x00050000

    code: list[tuple[int, int, int, int]] = [
        (load, 0, 0, at_arch),
        (equal, 1, 0, _AUDIT_ARCH_X86_64),
        (answer, 0, 0, kill),
        (load, 0, 0, at_number),
        (0x35, 0, 1, 0x40000000),  # numbers of the x32 ABI, which shares the architecture id
        (answer, 0, 0, kill),
        (0x25, 0, 1, _FIRST_UNKNOWN),
        (answer, 0, 0, refuse | _ENOSYS),
        (equal, 0, 1, _CLONE3),  # a filter cannot see its flags; the C library then uses clone
        (answer, 0, 0, refuse | _ENOSYS),
    ]
    for number in _REFUSED:
        code += [(equal, 0, 1, number), (answer, 0, 0, refuse | _EPERM)]
    code += [
        (equal, 0, 3, _CLONE),
        (load, 0, 0, at_first_argument),
        (bits, 1, 0, _CLONE_THREAD),
        (answer, 0, 0, refuse | _EPERM),
        (answer, 0, 0, allow),
    ]
    program = b"".join(struct.pack("HBBI", *line) for line in code)
    buffer = ctypes.create_string_buffer(program)
    header = struct.pack("HxxxxxxP", len(code), ctypes.addressof(buffer))
    _must(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    _must(_libc.prctl(_PR_SET_SECCOMP, 2, header, 0, 0), "seccomp")


def _limit(limits: dict[str, Any], own_uid: bool) -> None:
    resources = {
        resource.RLIMIT_AS: limits["memory_mib"] * 2**20,
        resource.RLIMIT_FSIZE: limits["file_mib"] * 2**20,
        resource.RLIMIT_NPROC: limits["threads"] + (not own_uid),  # else process 1 counts too
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 64,
        resource.RLIMIT_RTPRIO: 0,
    }
    for name, limit in resources.items():
        resource.setrlimit(name, (limit, limit))
    # SIGXCPU comes at the limit and shows the reason; SIGKILL a second later if it was ignored.
    resource.setrlimit(resource.RLIMIT_CPU, (limits["cpu_s"], limits["cpu_s"] + 1))


def _die_with_parent() -> None:
    _must(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "pdeathsig")


def _enter_namespaces() -> int | None:
    """Enter new namespaces; return a user id for the program, or None to keep the current one."""
    kinds = _CLONE_NEWNS | _CLONE_NEWCGROUP | _CLONE_NEWUTS
    kinds |= _CLONE_NEWIPC | _CLONE_NEWPID | _CLONE_NEWNET
    uid, gid = os.geteuid(), os.getegid()
    with open("/proc/self/uid_map") as file:
        is_root = uid == 0 and file.read().split() == ["0", "0", str(2**32 - 1)]
    if is_root:  # process limits do not apply to root: use another user
        _must(_libc.unshare(kinds), "unshare")
        return _FIRST_UID + os.getpid()
    _must(_libc.unshare(kinds | _CLONE_NEWUSER), "unshare (user namespaces)")
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{_NOBODY} {uid} 1"),
        ("gid_map", f"{_NOBODY} {gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    return None


def _become_program(job: dict[str, Any], uid: int | None, orders: int) -> NoReturn:
    """Run the program in this process as Python runs a script."""
    if uid is not None:
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(uid, uid, uid)
    header, none = struct.pack("Ii", _CAPABILITY_VERSION, 0), bytes(24)
    _must(_libc.capset(header, none), "capset")
    _limit(job, own_uid=uid is not None)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir("/tmp")
    _filter_system_calls()
    # The limit is for new descriptors: an inherited one may lie above it.
    os.closerange(3, 1 + max(orders, os.sysconf("SC_OPEN_MAX")))
    sys.argv, sys.modules["__main__"] = ["/main.py"], (main := types.ModuleType("__main__"))
    file = ctypes.c_void_p(_fopen(b"/main.py", b"r"))
    # Unlike `exec`, it leaves no line of ours in a traceback.
    failed = ctypes.pythonapi.PyRun_SimpleFileExFlags(file, b"/main.py", 1, None)
    # As Python ends, without the modules' teardown, which would copy all memory of this fork.
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    vars(main).clear()
    gc.collect()
    status = 1 if failed else 0
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            if not getattr(stream, "closed", False):
                stream.flush()
        except Exception:
            status = 120  # Python's
    sys.stdout = sys.__stdout__ = None  # flushes what the program had replaced
    os._exit(status)


def _init(job: dict[str, Any], uid: int | None, orders: int) -> None:
    """Run as process 1: build the root, then run the program once per message on `orders`."""
    _die_with_parent()
    os.setsid()  # else the program's `kill(0, ...)` would reach the first process
    _build_root(job["files"], job["packages"])
    _must(_libc.sethostname(b"sandbox", 7), "sethostname")
    _must(_libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "dumpable")
    for add in (site.setquit, site.setcopyright, site.sethelper):  # `site` looks for packages too
        add()
    gc.freeze()  # so that no run has to copy the memory of what is loaded
    os.write(orders, b"ready")
    while os.read(orders, 1):
        _renew(job["file_mib"] * 2**20)
        program = os.fork()
        if program == 0:
            _become_program(job, uid, orders)
        _, wait_status, used = os.wait4(program, 0)
        status = os.waitstatus_to_exitcode(wait_status)
        # A program that ignores SIGXCPU is killed by SIGKILL instead.
        if status == -signal.SIGKILL and used.ru_utime + used.ru_stime > job["cpu_s"]:
            status = -signal.SIGXCPU
        os.write(orders, str(status if status >= 0 else 128 - status).encode())


def _main(job_fd: int, orders: int, parent: int) -> None:
    with open(job_fd, encoding="utf-8") as file:
        job = json.load(file)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_with_parent()
    if os.getppid() != parent:
        return
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # first choice of the out-of-memory killer
    uid = _enter_namespaces()
    init = os.fork()
    if init == 0:
        _reported(orders, lambda: _init(job, uid, orders))
        os._exit(0)  # a normal exit would flush inherited buffers a second time
    os.close(orders)
    os.waitpid(init, 0)


def _reported(orders: int, step: Callable[[], None]) -> None:
    try:
        step()
    except Exception as error:  # what this machine refused; `CodeSandbox` raises it
        os.write(orders, f"{type(error).__name__}: {error}".encode())


if __name__ == "__main__":
    _numbers = [int(text) for text in sys.argv[1:]]
    _reported(_numbers[1], lambda: _main(*_numbers))
