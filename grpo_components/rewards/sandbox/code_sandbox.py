"""Sandbox for Python programs written by a model: no network, no files, hard limits."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, NoReturn

from grpo_components.rewards.sandbox.fair_queue import FairQueue
from grpo_components.rewards.sandbox.inside.contain import TIMED_OUT

_CONTAIN = Path(__file__).parent / "inside" / "contain.py"
_OLDEST_KERNEL = (5, 14)
"""First Linux version that counts processes per user namespace and makes mount trees read-only."""
_GRACE_S = 30.0
"""Seconds for the sandbox itself to start and end, on top of the program's wall-clock limit."""
_MAX_QUEUE_S = 600.0
_MAX_LIMIT = 2**20
"""Maximum of every limit (time, memory, processes), each in its own unit."""
_CPU_LIMIT_STATUS = 128 + 24  # SIGXCPU
_MAX_REPORT_CHARS = 1000


class SandboxError(RuntimeError):
    """The sandbox could not be set up, so the program did not run; the program is not to blame."""


@dataclass(frozen=True)
class Limits:
    """Resources that one program may use.

    Args:
        cpu_s: CPU seconds of all threads together.
        wall_s: wall-clock seconds after which the program is killed, even if it only waits.
        memory_mib: MiB of address space, including about 50 MiB for Python itself.
        file_mib: limit in MiB on each file, on all files together, and on each of stdout and
            stderr.
        threads: largest number of threads at a time. A program can never start other processes.

    Raises:
        ValueError: a limit is out of range.
    """

    cpu_s: int = 2
    wall_s: float = 8.0
    memory_mib: int = 512
    file_mib: int = 4
    threads: int = 16

    def __post_init__(self) -> None:
        for name, least in (("memory_mib", 128), ("cpu_s", 1), ("file_mib", 1), ("threads", 1)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= _MAX_LIMIT:
                allowed = f"a whole number from {least} to {_MAX_LIMIT}"
                raise ValueError(f"{name}: {value!r} given; allowed: {allowed}")
        if type(self.wall_s) not in (int, float) or not 0 < self.wall_s <= _MAX_LIMIT:
            allowed = f"a number above 0, at most {_MAX_LIMIT}"
            raise ValueError(f"wall_s: {self.wall_s!r} given; allowed: {allowed}")


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
    """Seconds that the program ran, without its wait in the queue."""


class CodeSandbox:
    """Runs Python programs, each in a separate process with only the standard library.

    A program gets its own namespaces (no network, no other processes, no mounts of the machine), a
    read-only root with the standard library, a private /tmp, another user id, an empty environment
    and hard limits. A seccomp filter refuses system calls that create processes or sockets, or
    allocate memory that no limit counts. This needs Linux on x86-64.

    Args:
        limits: resources that each program may use; None uses the defaults of `Limits`.
        max_programs: programs that may run at a time; further callers wait in a `FairQueue`.

    Raises:
        ValueError: `max_programs` is below 1, or this machine cannot sandbox programs; there is no
            weaker mode to fall back to.
    """

    def __init__(self, limits: Limits | None = None, max_programs: int = 1) -> None:
        if type(max_programs) is not int or max_programs < 1:
            raise ValueError(f"max_programs: {max_programs!r} given; allowed: a whole number >= 1")
        self._limits = limits or Limits()
        self._max_programs = max_programs
        self._queue = FairQueue(max_programs)
        release = tuple(int(part) for part in re.findall(r"\d+", platform.release())[:2])
        if (sys.platform, platform.machine()) != ("linux", "x86_64") or release < _OLDEST_KERNEL:
            here = f"{platform.system()} {platform.release()} on {platform.machine()}"
            _refuse(f"this is {here}; it needs Linux 5.14 or newer on x86-64")
        try:
            outcome = self.run("import sys; sys.stdout.write('contained')")
        except SandboxError as error:
            _refuse(str(error))
        if outcome.stdout != "contained":
            _refuse(f"a trial program ended with {outcome}")

    def run(
        self, program: str, stdin: str = "", wall_s: float | None = None, used_s: float = 0.0
    ) -> Outcome:
        """Run one program until it ends. Any thread may call this; if it dies, so does the program.

        Args:
            program: source text.
            stdin: text on the program's standard input.
            wall_s: wall-clock limit of this run in seconds; ignored if above `Limits.wall_s`.
            used_s: seconds that the caller's earlier programs ran; they delay it in the queue.

        Raises:
            SandboxError: the program could not be started.
        """
        with (
            self._slot(used_s),
            _memory_file(stdin) as given,
            _memory_file() as out,
            _memory_file() as err,
        ):
            files = (given.fileno(), out.fileno(), err.fileno())
            started = time.monotonic()
            running = self._start(program, {"dev/stdin": stdin}, *files, wall_s=wall_s)
            outcome = self._outcome(running, out, err)
            return replace(outcome, wall_s=time.monotonic() - started)

    def run_connected(
        self, program: str, files: Mapping[str, str], other: str, other_files: Mapping[str, str]
    ) -> Outcome:
        """Run two programs in separate sandboxes; the stdout of each is the stdin of the other.

        Args:
            program: source text of the program whose outcome counts.
            files: content of the files in the root folder of `program`, by file name.
            other: source text of the other program; it is killed when `program` ends.
            other_files: content of the files in the root folder of `other`, by file name.

        Returns:
            The outcome of `program`, without its stdout.

        Raises:
            SandboxError: one of the programs could not be started.
        """
        with self._slot(), _memory_file() as nothing, _memory_file() as err:
            with contextlib.ExitStack() as pipes:
                to_other, of_program, to_program, of_other = ends = [*os.pipe(), *os.pipe()]
                for end in ends:
                    pipes.callback(os.close, end)
                helper = self._start(other, other_files, to_other, of_other, nothing.fileno())
                try:
                    running = self._start(program, files, to_program, of_program, err.fileno())
                except SandboxError:
                    helper.end()
                    raise
            try:  # our ends of the pipes are closed now, so each program notices if the other exits
                return self._outcome(running, nothing, err)
            finally:
                if (report := helper.end()) not in ("", TIMED_OUT):
                    raise SandboxError(f"cannot sandbox a program: {report}")

    @contextlib.contextmanager
    def _slot(self, used_s: float = 0.0) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self._queue.slot(used_s, _MAX_QUEUE_S))
            except TimeoutError:
                waited = f"a program waited {_MAX_QUEUE_S:g} s for a free sandbox"
                others = f"{self._max_programs} others run at a time"
                raise SandboxError(f"{waited}; {others}") from None
            yield

    def _start(
        self,
        program: str,
        files: Mapping[str, str],
        stdin: int,
        stdout: int,
        stderr: int,
        wall_s: float | None = None,
    ) -> _Running:
        limits, mib = self._limits, 2**20
        job = {
            "files": {**files, "main.py": program},
            "cpu_s": limits.cpu_s,
            "wall_s": min(limits.wall_s, wall_s or limits.wall_s),
            "memory_bytes": limits.memory_mib * mib,
            "file_bytes": limits.file_mib * mib,
            "threads": limits.threads,
        }
        report, theirs = os.pipe()
        try:
            with _memory_file(json.dumps(job)) as described:
                numbers = map(str, (described.fileno(), theirs, os.getpid()))
                process = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(_CONTAIN), *numbers],
                    env={},
                    pass_fds=[described.fileno(), theirs],
                    stdin=stdin,
                    stdout=stdout,
                    stderr=stderr,
                    start_new_session=True,  # keep Ctrl-C away from it
                )
        except OSError as error:
            os.close(report)
            raise SandboxError(f"cannot start a process for a program: {error}") from error
        finally:
            os.close(theirs)
        return _Running(process, report)

    def _outcome(self, running: _Running, out: IO[bytes], err: IO[bytes]) -> Outcome:
        status, report = running.wait(self._limits.wall_s + _GRACE_S)
        if report not in ("", TIMED_OUT):
            raise SandboxError(f"cannot sandbox a program: {report}")
        timed_out = report == TIMED_OUT or status == _CPU_LIMIT_STATUS
        size = self._limits.file_mib * 2**20
        stdout, stderr = (
            os.pread(file.fileno(), size, 0).decode(errors="replace") for file in (out, err)
        )
        return Outcome(status, stdout, stderr, timed_out)


@dataclass(frozen=True)
class _Running:
    """Handle on a running sandbox, to wait for its end or to kill it."""

    process: subprocess.Popen[bytes]
    report: int
    """Descriptor of the reading end of the pipe for the sandbox's report."""

    def wait(self, timeout_s: float) -> tuple[int, str]:
        """Wait until the sandbox ends."""
        ended = select.poll()
        pidfd = os.pidfd_open(self.process.pid)
        try:
            ended.register(pidfd, select.POLLIN)
            on_time = bool(ended.poll(timeout_s * 1000))
        finally:
            os.close(pidfd)
            report = self.end()
        if not on_time:
            raise SandboxError(f"a sandbox did not end within {timeout_s:g} s")
        return self.process.returncode, report

    def end(self) -> str:
        """Kill everything in the sandbox and return its report."""
        self.process.kill()
        self.process.wait()
        with open(self.report, encoding="utf-8", errors="replace") as file:
            return file.read(_MAX_REPORT_CHARS)


def _memory_file(text: str = "") -> IO[bytes]:
    """Create an anonymous file in memory that holds a text."""
    file = os.fdopen(os.memfd_create("program"), "w+b", buffering=0)
    file.write(text.encode(errors="surrogatepass"))
    file.seek(0)
    return file


def _refuse(why: str) -> NoReturn:
    allowed = "a machine where programs may create namespaces (docs/rewards.md)"
    raise ValueError(
        f"code sandbox: this machine cannot sandbox programs: {why}; allowed: {allowed}"
    )
