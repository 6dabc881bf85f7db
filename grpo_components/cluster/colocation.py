"""Lets the trainers and generators of a colocated run take turns on the same GPUs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from grpo_components.cluster.handles import GeneratorHandle
from grpo_components.errors import RoleLostError
from grpo_components.exchange.ledger import Ledger


class Colocation:
    """Puts all generators to sleep while the trainers train or load a checkpoint.

    A sleeping generator has no weights; it wakes when it pulls for the next group or evaluation. No
    pull can come during a step: the step's groups are complete, and the staleness contract holds
    later groups back until the step has made its weights. (After a skipped step, later groups start
    with the same weights, which are pulled once more.)
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._asleep: set[str] = set()
        """Names of the generators whose process sleeps, or ended while it slept."""
        self._ended = asyncio.Event()
        """Set outside the trainers' turns."""
        self._ended.set()

    @asynccontextmanager
    async def trainers_turn(
        self, generators: Sequence[GeneratorHandle]
    ) -> AsyncIterator[dict[str, float]]:
        """Context manager: the trainers have the GPUs; entered once every generator sleeps.

        It first waits for a running evaluation. It yields metrics in seconds: `time/wake`, the
        longest load that woke a generator before this turn, and `time/sleep`, until all slept.
        """
        async with AsyncExitStack() as held:
            began = time.perf_counter()
            for generator in generators:  # an evaluation holds these, and so does a pull
                await held.enter_async_context(generator.swapping)
            # In a replay the locks are open: the evaluation's end comes before this in the record.
            await self._ledger.events.take("sleep", step=self._ledger.steps_done + 1)
            running = [entry.group_id for entry in self._ledger.in_state("in_flight")]
            assert not running, f"groups {running} run, and the trainers begin their turn"
            loads_s = max(generator.load_s for generator in generators)
            await self._put_to_sleep(generators)
            self._ended.clear()
            try:
                yield {"time/wake": loads_s, "time/sleep": time.perf_counter() - began}
            finally:
                self._ended.set()

    async def _put_to_sleep(self, generators: Sequence[GeneratorHandle]) -> None:
        """Return once all generators sleep, also those that restarted while others fell asleep."""
        self._asleep.clear()
        while awake := [g for g in generators if not g.lost and g.name not in self._asleep]:
            await asyncio.gather(*map(self._sleep, awake))

    async def _sleep(self, generator: GeneratorHandle) -> None:
        try:
            if aborted := await generator.sleep():
                self._ledger.events.note("abort", role=generator.name, responses=aborted)
        except RoleLostError:
            return
        self._asleep.add(generator.name)

    async def pause(self, name: str, seconds: float) -> None:
        """Wait before a generator restarts: its engine must not start on the trainers' GPU."""
        await asyncio.sleep(seconds)
        while not self._ended.is_set():
            await self._ended.wait()
        self._asleep.discard(name)
