"""An inference engine in virtual time: continuous batching, and weight swaps between two steps."""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import Counter, deque
from dataclasses import dataclass

from grpo_components.twin.cores import BusyTime, Job, Process


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step of an engine."""

    per_step: float
    """Seconds of every step."""
    per_sequence: float
    """Seconds more for each sequence in the batch."""
    per_prompt: float
    """Seconds more for each prompt that is read in the step."""

    def of(self, sequences: int, prompts: int = 0) -> float:
        """Return the seconds of a step."""
        return self.per_step + self.per_sequence * sequences + self.per_prompt * prompts


class VirtualEngine:
    """Samples one token of every running sequence per step, as vLLM does.

    Steps in which no sequence comes or goes are one job. A request or new weights that arrive
    meanwhile enter at the end of the present step.
    """

    def __init__(
        self, process: Process, step_time: StepTime, load_s: float, max_num_seqs: int
    ) -> None:
        self._process, self._step_time, self._load_s = process, step_time, load_s
        self._max_num_seqs = max_num_seqs
        self.version = 0
        self._swaps = [(0, 0)]
        """(first step, version) of each version of the weights, in order."""
        self._step = 0
        self._waiting: deque[tuple[int, asyncio.Future[Counter[int]]]] = deque()
        self._loads: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._running: list[tuple[int, int, int, asyncio.Future[Counter[int]]]] = []
        """Heap of (step after which it ends, number, first step, result)."""
        self._number = 0
        self._arrived = asyncio.Event()
        self._job: tuple[Job, float, float] | None = None
        """Job under way, seconds of its first step and of each later one."""
        self.busy = BusyTime()
        """Time in which the engine sampled or loaded weights."""

    def sample(self, tokens: int) -> asyncio.Future[Counter[int]]:
        """Queue a response."""
        future: asyncio.Future[Counter[int]] = asyncio.get_running_loop().create_future()
        self._waiting.append((tokens, future))
        self._wake()
        return future

    def load(self, version: int) -> asyncio.Future[None]:
        """Swap the weights before the next step."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._loads.append((version, future))
        self._wake()
        return future

    def _wake(self) -> None:
        self._arrived.set()
        if self._job is not None:
            job, first, later = self._job
            passed = self._process.passed(job)
            whole = math.ceil(max(0.0, passed - first) / later - 1e-9) if later else 0
            self._process.shorten(job, min(job.seconds, first + whole * later))

    async def run(self) -> None:
        """Make steps forever."""
        while True:
            if not (self._waiting or self._loads or self._running):
                self._arrived.clear()
                await self._arrived.wait()
            with self.busy.count():
                while self._loads:
                    version, loaded = self._loads.popleft()
                    await self._process.work(self._load_s)
                    self.version = version
                    self._swaps.append((self._step, version))
                    loaded.set_result(None)
                    await asyncio.sleep(0)  # who waits for the weights goes on before the next step
                prompts = self._enter()
                if self._running:
                    await self._make_steps(prompts)

    def _enter(self) -> int:
        entered = 0
        while self._waiting and len(self._running) < self._max_num_seqs:
            tokens, future = self._waiting.popleft()
            last = self._step + max(1, tokens)
            heapq.heappush(self._running, (last, self._number, self._step, future))
            self._number += 1
            entered += 1
        return entered

    async def _make_steps(self, prompts: int) -> None:
        sequences = len(self._running)
        first, later = self._step_time.of(sequences, prompts), self._step_time.of(sequences)
        steps = self._running[0][0] - self._step
        job = self._process.begin(first + (steps - 1) * later)
        self._job = job, first, later
        await job.done.wait()
        self._job = None
        self._step += 1 + round((job.seconds - first) / later) if later else steps
        while self._running and self._running[0][0] <= self._step:
            _, _, entered, future = heapq.heappop(self._running)
            future.set_result(self._versions(entered, self._step))

    def _versions(self, first: int, end: int) -> Counter[int]:
        """Return the number of steps of each version in the steps from `first` to before `end`."""
        found: Counter[int] = Counter()
        for start, version in reversed(self._swaps):
            if start < end:
                found[version] += end - max(start, first)
                end = max(start, first)
            if start <= first:
                break
        return found
