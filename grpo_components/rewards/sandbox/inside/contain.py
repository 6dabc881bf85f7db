"""Script that the code sandbox starts: gives up all privileges, then becomes the program.

It uses three processes. The first enters new namespaces and enforces the wall-clock limit. The
second is process 1 of the new PID namespace: it builds the file system and waits for the third, the
program. When process 1 ends, the kernel kills everything left in its namespace.
"""

from __future__ import annotations

import ctypes
import glob
import json
import os
import resource
import select
import signal
import struct
import sys
import sysconfig
from collections.abc import Callable
from typing import Any, NoReturn

TIMED_OUT = "wall-clock limit"
"""Report that the program exceeded its wall-clock limit; any other says why it could not start."""

_CLONE_NEWNS, _CLONE_NEWCGROUP, _CLONE_NEWUTS = 0x20000, 0x2000000, 0x4000000
_CLONE_NEWIPC, _CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = (1 << n for n in (27, 28, 29, 30))
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT, _MS_BIND = 1, 2, 4, 8, 32, 4096
_MS_REC, _MS_PRIVATE = 16384, 1 << 18
_MNT_DETACH = 2
_AT_FDCWD, _AT_RECURSIVE, _MOUNT_SETATTR = -100, 0x8000, 442
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_NOBODY = 65534
_FIRST_UID = 1_000_000_000
"""Lowest user id of programs if root runs the sandbox; each has its own, so limits are separate."""
_CPU_LIMIT_STATUS = 128 + signal.SIGXCPU
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


def _bind(source: str) -> None:
    target = _MOUNT_POINT + source
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    elif not os.path.exists(target):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    _mount(source, target, "", _MS_BIND | _MS_REC)
    # A device in a read-only bind mount can still be written to, but its mode and owner are fixed.
    _read_only(target, _MS_NOEXEC if source.startswith("/dev/") else _MS_NODEV)


def _build_root(python: str, files: dict[str, str], file_bytes: int) -> None:
    """Build and enter a root with shared libraries, Python without packages, the files and /tmp."""
    _mount("none", "/", "", _MS_REC | _MS_PRIVATE)
    space = sum(4 * len(text) for text in files.values()) + 2**20
    _mount("tmpfs", _MOUNT_POINT, "tmpfs", _MS_NOSUID, f"size={space},mode=755")
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
    for name in [python, "/etc/ld.so.cache", *(f"/dev/{device}" for device in _DEVICES)]:
        if os.path.exists(name) and not any(name.startswith(f"{b}/") for b in bound):
            _bind(name)
    for folder in bound:  # hide installed packages: they may be private
        ours = _MOUNT_POINT + folder
        for kind in ("site-packages", "dist-packages"):
            for packages in [*glob.glob(f"{ours}/python*/{kind}"), *glob.glob(f"{ours}/{kind}")]:
                _mount("tmpfs", packages, "tmpfs", _MS_RDONLY | _MS_NOSUID | _MS_NODEV, "size=4k")
    for name, text in files.items():
        with open(f"{_MOUNT_POINT}/{name}", "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
    os.mkdir(f"{_MOUNT_POINT}/tmp")
    options = f"size={file_bytes},nr_inodes=1024,mode=1777"
    _mount("tmpfs", f"{_MOUNT_POINT}/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, options)
    _mount("none", _MOUNT_POINT, "", _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID)
    os.chdir(_MOUNT_POINT)
    _must(_libc.pivot_root(b".", b"."), "pivot_root")
    _must(_libc.umount2(b".", _MNT_DETACH), "umount of the old root")


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


def _limit(limits: dict[str, Any]) -> None:
    resources = {
        resource.RLIMIT_AS: limits["memory_bytes"],
        resource.RLIMIT_FSIZE: limits["file_bytes"],
        resource.RLIMIT_NPROC: limits["threads"] + 1,  # process 1 counts too
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
    """Enter new namespaces."""
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


def _status(wait_status: int) -> int:
    code = os.waitstatus_to_exitcode(wait_status)
    return code if code >= 0 else 128 - code


def _become_program(job: dict[str, Any], python: str) -> NoReturn:
    _limit(job)
    for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    environment = {"HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
    # Python uses no packages, byte code files or current folder. PYTHONHASHSEED fixes the order of
    # sets. Without `-S`, as `site` defines `exit` and `quit`.
    options = ["-s", "-P", "-B", "-X", "utf8", "-X", "int_max_str_digits=0"]
    os.chdir("/tmp")
    _filter_system_calls()
    os.execve(python, [python, *options, "/main.py"], environment)


def _init(job: dict[str, Any], python: str, uid: int | None, parent_lives: int) -> int:
    """Run as process 1: build the root, start the program and wait for it."""
    _die_with_parent()
    os.setsid()  # else the program's `kill(0, ...)` would reach the first process
    _build_root(python, job["files"], job["file_bytes"])
    _must(_libc.sethostname(b"sandbox", 7), "sethostname")
    if uid is not None:
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(uid, uid, uid)
        _die_with_parent()  # a change of user resets it
    _must(_libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "dumpable")
    if not os.read(parent_lives, 1):  # the parent is already dead
        return 1
    os.close(parent_lives)
    program = os.fork()
    if program == 0:
        _become_program(job, python)
    while True:  # also reaps orphans
        ended, wait_status, used = os.wait4(-1, 0)
        if ended == program:
            status = _status(wait_status)
            spent = used.ru_utime + used.ru_stime > job["cpu_s"]
            # A program that ignores SIGXCPU is killed by SIGKILL instead.
            return _CPU_LIMIT_STATUS if spent and status == 128 + signal.SIGKILL else status


def _main(job: dict[str, Any], report: int, parent: int) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_with_parent()
    if os.getppid() != parent:
        return 1
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # first choice of the out-of-memory killer
    python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    uid = _enter_namespaces()
    theirs, ours = os.pipe()
    init = os.fork()
    if init == 0:
        os.close(ours)
        code = _reported(report, lambda: _init(job, python, uid, theirs))
        os._exit(code)  # a normal exit would flush inherited buffers a second time
    os.close(theirs)
    os.write(ours, b"x")
    ended = select.poll()
    ended.register(os.pidfd_open(init), select.POLLIN)
    if not ended.poll(job["wall_s"] * 1000):
        os.write(report, TIMED_OUT.encode())
        os.kill(init, signal.SIGKILL)
    return _status(os.waitpid(init, 0)[1])


def _reported(report: int, step: Callable[[], int]) -> int:
    try:
        return step()
    except Exception as error:  # what this machine refused; `CodeSandbox` raises it
        os.write(report, f"{type(error).__name__}: {error}".encode())
        return 1


def _script(job_fd: int, report: int, parent: int) -> int:
    with open(job_fd, encoding="utf-8") as file:
        job = json.load(file)
    os.set_inheritable(report, False)  # so that exec closes it
    return _reported(report, lambda: _main(job, report, parent))


if __name__ == "__main__":
    sys.exit(_script(*map(int, sys.argv[1:])))
