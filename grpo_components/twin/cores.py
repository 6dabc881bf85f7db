"""CPU cores that processes share: each gets an equal part of them while more want to run."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Iterator


class Job:
    """CPU seconds that a process has to do; `done` is set once they are done."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.passed, self.done = seconds, 0.0, asyncio.Event()

    @property
    def left(self) -> float:
        """CPU seconds still to do."""
        return self.seconds - self.passed


class Cores:
    """Cores that processes share (processor sharing).

    A process that has jobs wants its number of threads. If all together want more than there is,
    each gets the same part of what it wants. The jobs of a process share what it gets.
    """

    def __init__(self, count: float) -> None:
        self._count, self._busy = count, list[Process]()
        self._since, self._timer = 0.0, None

    def change(self, process: Process, job: Job, *, begins: bool) -> None:
        """Add a job to a process, or take one away, and share the cores again."""
        self.advance()
        if begins:
            process.jobs.append(job)
            if len(process.jobs) == 1:
                self._busy.append(process)
        else:
            process.jobs.remove(job)
            if not process.jobs:
                self._busy.remove(process)

    def advance(self) -> None:
        """Let the jobs do what they can until now."""
        now = asyncio.get_running_loop().time()
        passed, self._since = now - self._since, now
        if not passed or not self._busy:
            return
        share = self._share()
        for process in self._busy:
            rate = process.threads * share / len(process.jobs)
            process.busy_s += passed * process.threads * share
            for job in process.jobs:
                job.passed += passed * rate

    def plan(self) -> None:
        """Set the timer for the job that ends next."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._busy:
            return
        share = self._share()
        next_s = math.inf
        for process in self._busy:
            rate = process.threads * share / len(process.jobs)
            least = min(job.left for job in process.jobs)
            next_s = min(next_s, max(least, 0.0) / rate)
        self._timer = asyncio.get_running_loop().call_later(next_s, self._end_jobs)

    def _share(self) -> float:
        wanted = sum(process.threads for process in self._busy)
        return min(1.0, self._count / wanted)

    def _end_jobs(self) -> None:
        self.advance()
        self._timer = None
        for process in list(self._busy):
            for job in list(process.jobs):
                if job.left <= 1e-9:
                    self.change(process, job, begins=False)
                    job.done.set()
        self.plan()


class BusyTime:
    """Counts the seconds in which a role works, up to now: a step may be under way."""

    def __init__(self) -> None:
        self._seconds, self._jobs, self._since = 0.0, 0, 0.0

    @contextlib.contextmanager
    def count(self) -> Iterator[None]:
        """Context manager: the role works; several at once count as one."""
        self.seconds()
        self._jobs += 1
        try:
            yield
        finally:
            self.seconds()
            self._jobs -= 1

    def seconds(self) -> float:
        """Return the seconds so far."""
        now = asyncio.get_running_loop().time()
        self._seconds += (now - self._since) * (self._jobs > 0)
        self._since = now
        return self._seconds


class Process:
    """A process that works on shared cores."""

    def __init__(self, cores: Cores, threads: float = 1.0) -> None:
        self._cores, self.threads = cores, threads
        self.jobs: list[Job] = []
        self.busy_s = 0.0
        """CPU seconds done so far."""

    def begin(self, seconds: float) -> Job:
        """Begin a job and return it; without seconds, it is done at once."""
        job = Job(seconds)
        if seconds <= 0:
            job.done.set()
            return job
        self._cores.change(self, job, begins=True)
        self._cores.plan()
        return job

    async def work(self, seconds: float) -> None:
        """Do a job, however long its CPU seconds take."""
        await self.begin(seconds).done.wait()

    def shorten(self, job: Job, seconds: float) -> None:
        """Change the CPU seconds of a job that is not done; not below what has passed."""
        self._cores.advance()
        job.seconds = max(seconds, job.passed)
        self._cores.plan()

    def passed(self, job: Job) -> float:
        """Return the CPU seconds of a job that have passed."""
        self._cores.advance()
        return job.passed
