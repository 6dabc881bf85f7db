"""Sandbox for Python programs written by a model: no network, no files, hard limits."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NoReturn

from grpo_components.rewards.sandbox.inside.contain import CPU_LIMIT_STATUS

_CONTAIN = Path(__file__).parent / "inside" / "contain.py"
_OLDEST_KERNEL = (5, 14)
"""First Linux version that counts processes per user namespace and makes mount trees read-only."""
_GRACE_S = 30.0
"""Seconds for the sandbox itself to start; they are not charged to the program."""
_KILLED_STATUS = 128 + 9  # SIGKILL
_MAX_REPORT_BYTES = 1000
_OPTIONS = ["-s", "-S", "-P", "-B", "-X", "utf8", "-X", "int_max_str_digits=0"]
"""Keep installed packages and the current folder off Python's path; write no byte-code files."""
_ENVIRONMENT = {"HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}


class SandboxError(RuntimeError):
    """The sandbox could not be set up, so the program did not run; the program is not to blame."""


@dataclass(frozen=True)
class Limits:
    """Resources that one program may use: seconds, MiB, threads at a time.

    `cpu_s` is CPU time of all threads together, `memory_mib` is address space (Python itself needs
    about 50), and `file_mib` is the size of /tmp, and the maximum size of each single file, also of
    stdout and of stderr.
    """

    cpu_s: int = 2
    wall_s: float = 8.0
    memory_mib: int = 512
    file_mib: int = 4
    threads: int = 16


@dataclass(frozen=True)
class Outcome:
    """How a program ended."""

    status: int
    """Exit status of the program, or 128 plus the number of the signal that killed it."""
    stdout: str
    stderr: str
    timed_out: bool
    """Whether the program was killed by its wall-clock or CPU limit."""
    wall_s: float = field(default=0.0, compare=False)
    """Seconds that the program ran."""


class CodeSandbox:
    """Runs Python programs, each in a separate process with only the standard library.

    A program gets its own namespaces (no network, no other processes, no mounts of the machine), a
    read-only root with the standard library, a private /tmp, another user id, an empty environment
    and hard limits. A seccomp filter refuses system calls that create processes or sockets, or
    allocate memory that no limit counts. This needs Linux on x86-64. Any thread may run programs.

    Raises:
        ValueError: this machine cannot sandbox programs; there is no weaker mode to fall back to.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        if self._limits.memory_mib < 128:  # with a little less, Python starts and imports fail
            raise ValueError(f"memory_mib: {self._limits.memory_mib} given; allowed: at least 128")
        release = tuple(int(part) for part in re.findall(r"\d+", platform.release())[:2])
        if (sys.platform, platform.machine()) != ("linux", "x86_64") or release < _OLDEST_KERNEL:
            here = f"{platform.system()} {platform.release()} on {platform.machine()}"
            _refuse(f"this is {here}; it needs Linux 5.14 or newer on x86-64")
        try:
            outcome = self.run("import sys; sys.stdout.write('contained')")
        except SandboxError as error:
            _refuse(str(error))
        if outcome.stdout != "contained":
            _refuse(f"a trial program with {self._limits} ended with {outcome}")

    def run(self, program: str, stdin: str = "", wall_s: float | None = None) -> Outcome:
        """Run one program until it ends. If the calling thread dies, so does the program.

        `wall_s` can only lower the wall-clock limit.
        """
        with self.opened(program) as run:
            return run(stdin, wall_s)

    @contextlib.contextmanager
    def opened(self, program: str) -> Iterator[Callable[[str, float | None], Outcome]]:
        """Open a sandbox; yield a function that runs the program, given stdin and limit in seconds.

        All runs use one sandbox, each in a new process with its own limits, memory and empty /tmp.
        No run can follow one that was killed at its wall-clock limit.
        """
        with (
            _memory_file() as given,
            _memory_file() as out,
            _memory_file() as err,
            self._start(program, {}, (given, out, err), {}) as running,
        ):
            running.wait_until_ready()

            def run(stdin: str = "", wall_s: float | None = None) -> Outcome:
                for file, text in ((given, stdin), (out, ""), (err, "")):
                    _rewrite(file, text)
                return self._outcome(running, out, err, wall_s)

            yield run

    def run_connected(
        self,
        program: str,
        files: Mapping[str, str],
        packages: Mapping[str, str],
        other_files: Mapping[str, str],
    ) -> Outcome:
        """Run a program in two sandboxes; the stdout of each run is the stdin of the other.

        Returns the outcome of the first run, without stdout; the second is killed when it ends.
        `files`, `other_files`: name in `/` -> text, in the first and in the second sandbox.
        `packages`: folder in the first sandbox -> folder on this machine.
        """
        with _memory_file() as nothing, _memory_file() as err, contextlib.ExitStack() as stack:
            to_second, of_first, to_first, of_second = ends = [*os.pipe(), *os.pipe()]
            first = self._start(program, files, (to_first, of_first, err), packages)
            second = self._start(program, other_files, (to_second, of_second, nothing), {})
            try:
                running, helper = [stack.enter_context(each) for each in (first, second)]
            finally:
                for end in ends:
                    os.close(end)
            # Our ends of the pipes are closed now, so each run notices if the other exits.
            for sandbox in (running, helper):
                sandbox.wait_until_ready()
            helper.begin(once=True)
            return self._outcome(running, nothing, err, None, once=True)

    @contextlib.contextmanager
    def _start(
        self,
        program: str,
        files: Mapping[str, str],
        streams: Sequence[IO[bytes] | int],
        packages: Mapping[str, str],
    ) -> Iterator[_Running]:
        """Start a sandbox for a program; at the end, kill everything in it."""
        stdin, stdout, stderr = streams
        job = {"files": {**files, "main.py": program}, "packages": {**packages}}
        job |= vars(self._limits)
        # Keeps messages apart, and tells if the other end has died.
        orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with orders:
            try:
                with theirs, _memory_file(json.dumps(job)) as described:
                    given = [described.fileno(), theirs.fileno()]
                    process = subprocess.Popen(
                        [sys.executable, *_OPTIONS, _CONTAIN, *map(str, given), str(os.getpid())],
                        env=_ENVIRONMENT,
                        pass_fds=given,
                        stdin=stdin,
                        stdout=stdout,
                        stderr=stderr,
                        start_new_session=True,  # keep Ctrl-C away from it
                    )
            except OSError as error:
                raise SandboxError(f"cannot start a process for a program: {error}") from error
            try:
                yield _Running(process, orders)
            finally:
                process.kill()
                process.wait()

    def _outcome(
        self,
        running: _Running,
        out: IO[bytes],
        err: IO[bytes],
        wall_s: float | None,
        once: bool = False,
    ) -> Outcome:
        started = time.monotonic()
        running.begin(once)
        status = running.receive(min(self._limits.wall_s, wall_s or self._limits.wall_s))
        seconds = time.monotonic() - started
        if status is None:
            running.process.kill()
        size = self._limits.file_mib * 2**20
        texts = [os.pread(f.fileno(), size, 0).decode(errors="replace") for f in (out, err)]
        ended = _KILLED_STATUS if status is None else int(status)
        timed_out = status is None or ended == CPU_LIMIT_STATUS
        return Outcome(ended, texts[0], texts[1], timed_out, seconds)


@dataclass(frozen=True)
class _Running:
    """Handle on a sandbox, to run its program or to kill it."""

    process: subprocess.Popen[bytes]
    orders: socket.socket

    def wait_until_ready(self) -> None:
        if self.receive(_GRACE_S) is None:
            raise SandboxError(f"cannot sandbox a program: it was not ready within {_GRACE_S:g} s")

    def begin(self, once: bool) -> None:
        """Start the program; if `once`, the sandbox ends when the program ends: no second run."""
        with contextlib.suppress(BrokenPipeError):  # `receive` says why
            self.orders.send(b"x")
        if once:
            self.orders.shutdown(socket.SHUT_WR)

    def receive(self, timeout_s: float) -> str | None:
        """Return what the sandbox sends: `ready`, or an exit status; None if it takes too long."""
        self.orders.settimeout(timeout_s)
        try:
            answer = self.orders.recv(_MAX_REPORT_BYTES).decode(errors="replace")
        except TimeoutError:
            return None
        if answer != "ready" and not answer.isdigit():
            raise SandboxError(f"cannot sandbox a program: {answer or 'it died'}")
        return answer


def _memory_file(text: str = "") -> IO[bytes]:
    """Create an anonymous file in memory that holds a text."""
    file = os.fdopen(os.memfd_create("program"), "w+b", buffering=0)
    _rewrite(file, text)
    return file


def _rewrite(file: IO[bytes], text: str) -> None:
    file.seek(0)
    file.truncate()
    file.write(text.encode(errors="surrogatepass"))
    file.seek(0)


def _refuse(why: str) -> NoReturn:
    allowed = "a machine where programs may create namespaces (docs/rewards.md)"
    problem = f"this machine cannot sandbox programs: {why}"
    raise ValueError(f"code sandbox: {problem}; allowed: {allowed}")
