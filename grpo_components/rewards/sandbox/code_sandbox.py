"""A sandbox for Python programs that a model wrote: no network, no files, hard limits."""

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

from grpo_components.rewards.sandbox.fair_places import FairPlaces
from grpo_components.rewards.sandbox.inside.contain import TIMED_OUT

_CONTAIN = Path(__file__).parent / "inside" / "contain.py"
_OLDEST_KERNEL = (5, 14)
"""Since then processes are counted by user namespace, and mounts made read-only as a tree."""
_GRACE_S = 30.0
"""What the sandbox itself gets to start and end, beside the program's wall clock."""
_LONGEST_QUEUE_S = 600.0
_MOST = 2**20
"""Of any limit: of MiB, all that a machine has."""
_ENDED_BY_CPU_LIMIT = 128 + 24  # SIGXCPU
_SHOWN = 1000


class SandboxError(RuntimeError):
    """A program could not be contained, and was not run: no program's fault."""


@dataclass(frozen=True)
class Limits:
    """What one program may use.

    Args:
        cpu_s: seconds of CPU time, of all threads together.
        wall_s: seconds until it is ended, waiting included.
        memory_mib: address space, with some 50 MiB for Python itself.
        file_mib: each file, all files together, and each of stdout and stderr.
        threads: at a time; further processes cannot be started at all.
    """

    cpu_s: int = 2
    wall_s: float = 8.0
    memory_mib: int = 512
    file_mib: int = 4
    threads: int = 16

    def __post_init__(self) -> None:
        for name, least in (("memory_mib", 128), ("cpu_s", 1), ("file_mib", 1), ("threads", 1)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= _MOST:
                allowed = f"a whole number from {least} to {_MOST}"
                raise ValueError(f"{name}: {value!r} given; allowed: {allowed}")
        if type(self.wall_s) not in (int, float) or not 0 < self.wall_s <= _MOST:
            allowed = f"a number above 0, at most {_MOST}"
            raise ValueError(f"wall_s: {self.wall_s!r} given; allowed: {allowed}")


@dataclass(frozen=True)
class Outcome:
    """How a program ended."""

    status: int
    """0 where it ended well; else its exit status, or 128 plus the signal that ended it."""
    stdout: str
    stderr: str
    timed_out: bool
    """Whether the wall clock or the limit on CPU time ended it."""
    wall_s: float = field(default=0.0, compare=False)
    """Seconds that it took, without the wait for its turn."""


class CodeSandbox:
    """Runs Python programs, each in a process of its own that has nothing but a bare Python.

    A program gets its own namespaces (no network, other processes, or mounts), a root with the
    standard library read-only and a private /tmp, another user, an empty environment, hard limits,
    and a filter that refuses system calls for new processes, sockets, and memory that no limit
    counts. Linux on x86-64, with the standard library only: no installed package is there.

    Args:
        limits: of each program.
        max_programs: that run at a time; further callers wait, see `FairPlaces`.

    Raises:
        ValueError: if `max_programs` is below 1, or this machine cannot contain a program; there is
            no weaker mode.
    """

    def __init__(self, limits: Limits | None = None, max_programs: int = 1) -> None:
        if type(max_programs) is not int or max_programs < 1:
            raise ValueError(f"max_programs: {max_programs!r} given; allowed: a whole number >= 1")
        self._limits = limits or Limits()
        self._max_programs = max_programs
        self._places = FairPlaces(max_programs)
        release = tuple(int(part) for part in re.findall(r"\d+", platform.release())[:2])
        if (sys.platform, platform.machine()) != ("linux", "x86_64") or release < _OLDEST_KERNEL:
            here = f"{platform.system()} {platform.release()} on {platform.machine()}"
            _refuse(f"this is {here}, and not Linux 5.14 or newer on x86-64")
        try:
            outcome = self.run("import sys; sys.stdout.write('contained')")
        except SandboxError as error:
            _refuse(str(error))
        if outcome.stdout != "contained":
            _refuse(f"a trial program ended with {outcome}")

    def run(
        self, program: str, stdin: str = "", wall_s: float | None = None, used_s: float = 0.0
    ) -> Outcome:
        """Run one program to its end, from any thread; it ends with that thread.

        Args:
            program: source text.
            stdin: what it can read.
            wall_s: seconds until it is ended, where there are fewer than the limit.
            used_s: seconds that the caller's programs have run before; others go first by as much.

        Raises:
            SandboxError: if the program could not be started.
        """
        with (
            self._place(used_s),
            _memory_file(stdin) as given,
            _memory_file() as out,
            _memory_file() as err,
        ):
            files = (given.fileno(), out.fileno(), err.fileno())
            started = time.monotonic()
            running = self._start(program, {}, *files, wall_s=wall_s)
            outcome = self._outcome(running, out, err)
            return replace(outcome, wall_s=time.monotonic() - started)

    def run_connected(
        self, program: str, files: Mapping[str, str], other: str, other_files: Mapping[str, str]
    ) -> Outcome:
        """Run two programs, each in a sandbox of its own, that read what the other one writes.

        Args:
            program: whose outcome counts; the other one is ended with it.
            files: of `program`, text by name.
            other: runs beside it.
            other_files: of `other`.

        Returns:
            The outcome of `program`, without its stdout.

        Raises:
            SandboxError: if one of them could not be started.
        """
        with self._place(), _memory_file() as nothing, _memory_file() as err:
            with contextlib.ExitStack() as pipes:
                to_other, of_program, to_program, of_other = ends = [*os.pipe(), *os.pipe()]
                for end in ends:
                    pipes.callback(os.close, end)
                beside = self._start(other, other_files, to_other, of_other, nothing.fileno())
                try:
                    running = self._start(program, files, to_program, of_program, err.fileno())
                except SandboxError:
                    beside.end()
                    raise
            try:  # now that nobody here holds the pipes: each sees the other one's end
                return self._outcome(running, nothing, err)
            finally:
                if (report := beside.end()) not in ("", TIMED_OUT):
                    raise SandboxError(f"a program cannot be contained: {report}")

    @contextlib.contextmanager
    def _place(self, used_s: float = 0.0) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self._places.place(used_s, _LONGEST_QUEUE_S))
            except TimeoutError:
                waited = f"no sandbox was free for a program within {_LONGEST_QUEUE_S:g} s"
                others = f"others run {self._max_programs} at a time"
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
                    start_new_session=True,  # Ctrl-C is not for it
                )
        except OSError as error:
            os.close(report)
            raise SandboxError(f"no process for a program: {error}") from error
        finally:
            os.close(theirs)
        return _Running(process, report)

    def _outcome(self, running: _Running, out: IO[bytes], err: IO[bytes]) -> Outcome:
        status, report = running.wait(self._limits.wall_s + _GRACE_S)
        if report not in ("", TIMED_OUT):
            raise SandboxError(f"a program cannot be contained: {report}")
        timed_out = report == TIMED_OUT or status == _ENDED_BY_CPU_LIMIT
        size = self._limits.file_mib * 2**20
        stdout, stderr = (
            os.pread(file.fileno(), size, 0).decode(errors="replace") for file in (out, err)
        )
        return Outcome(status, stdout, stderr, timed_out)


@dataclass(frozen=True)
class _Running:
    """A sandbox at work."""

    process: subprocess.Popen[bytes]
    report: int

    def wait(self, timeout_s: float) -> tuple[int, str]:
        """Wait for its end.

        Returns:
            The program's status, and what the sandbox itself has to say.
        """
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
        """End it, with all that runs in it, and give back what the sandbox has to say."""
        self.process.kill()
        self.process.wait()
        with open(self.report, encoding="utf-8", errors="replace") as file:
            return file.read(_SHOWN)


def _memory_file(text: str = "") -> IO[bytes]:
    """A file that is nowhere: closed, it is gone."""
    file = os.fdopen(os.memfd_create("program"), "w+b", buffering=0)
    file.write(text.encode(errors="surrogatepass"))
    file.seek(0)
    return file


def _refuse(why: str) -> NoReturn:
    allowed = "a machine where programs may make namespaces (docs/rewards.md)"
    raise ValueError(
        f"code sandbox: this machine cannot contain programs, {why}; allowed: {allowed}"
    )
