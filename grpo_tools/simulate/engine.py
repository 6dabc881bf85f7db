"""An inference engine in virtual time: continuous batching, and weight swaps between two steps."""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import Counter, deque

from grpo_tools.simulate.times import StepTime
from grpo_tools.simulate.virtual_time import BusyTime, now


class VirtualEngine:
    """Samples one token of every running sequence per step, as vLLM does.

    Steps in which no sequence comes or goes pass at once. A request or new weights that arrive
    meanwhile enter at the end of the present step.
    """

    def __init__(self, step_time: StepTime, load_s: float, max_num_seqs: int) -> None:
        self._step_time, self._load_s, self._max_num_seqs = step_time, load_s, max_num_seqs
        self._swaps = [(0, 0)]
        """(first step, version) of each version of the weights, in order."""
        self._step = self._number = 0
        self._waiting: deque[tuple[int, asyncio.Future[Counter[int]]]] = deque()
        self._loads: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._running: list[tuple[int, int, int, asyncio.Future[Counter[int]]]] = []
        """Heap of (step after which it ends, number, first step, result)."""
        self._arrived = asyncio.Event()
        self.busy = BusyTime()

    def sample(self, tokens: int) -> asyncio.Future[Counter[int]]:
        """Queue a response; its result is policy version -> number of tokens that it sampled."""
        future: asyncio.Future[Counter[int]] = asyncio.get_running_loop().create_future()
        self._waiting.append((tokens, future))
        self._arrived.set()
        return future

    def load(self, version: int) -> asyncio.Future[None]:
        """Swap the weights before the next step."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._loads.append((version, future))
        self._arrived.set()
        return future

    async def run(self) -> None:
        """Make steps forever."""
        while True:
            if not (self._waiting or self._loads or self._running):
                self._arrived.clear()
                await self._arrived.wait()
            with self.busy.count():
                while self._loads:
                    version, loaded = self._loads.popleft()
                    await asyncio.sleep(self._load_s)
                    self._swaps.append((self._step, version))
                    loaded.set_result(None)
                    await asyncio.sleep(0)  # who waits for the weights goes on before the next step
                prompts = self._enter()
                if self._running:
                    await self._make_steps(prompts)

    def _enter(self) -> int:
        """Let waiting sequences in while there is room, and return their number."""
        entering = min(len(self._waiting), self._max_num_seqs - len(self._running))
        for _ in range(entering):
            tokens, future = self._waiting.popleft()
            heapq.heappush(
                self._running, (self._step + max(1, tokens), self._number, self._step, future)
            )
            self._number += 1
        return entering

    async def _make_steps(self, prompts: int) -> None:
        """Make steps until a sequence ends, or until the end of the step in which one arrives."""
        sequences, began = len(self._running), now()
        first, later = self._step_time.of(sequences, prompts), self._step_time.of(sequences)
        steps = self._running[0][0] - self._step
        self._arrived.clear()
        try:
            async with asyncio.timeout(first + (steps - 1) * later):
                await self._arrived.wait()
            passed = now() - began
            whole = 1 + math.ceil(max(0.0, passed - first) / later - 1e-9) if later else steps
            steps = min(steps, whole)
            await asyncio.sleep(max(0.0, first + (steps - 1) * later - passed))
        except TimeoutError:
            pass
        self._step += steps
        while self._running and self._running[0][0] <= self._step:
            _, _, entered, future = heapq.heappop(self._running)
            future.set_result(self._versions(entered))

    def _versions(self, first: int) -> Counter[int]:
        """Return the number of steps of each version in the steps since `first`."""
        found, end = Counter[int](), self._step
        for start, version in reversed(self._swaps):
            if start < end:
                found[version] += end - max(start, first)
                end = max(start, first)
            if start <= first:
                break
        return found
