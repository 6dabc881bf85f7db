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

    A sleeping generator has no weights; it wakes when it pulls weights for a group or evaluation.
    No pull can come during a training step: all groups of the step are complete, and the staleness
    contract lets no later group start before the step has made new weights. (After a skipped step,
    later groups start with the same weights, which are pulled once more.)
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._asleep: set[str] = set()
        """Names of the generators whose process sleeps, or ended while it slept."""
        self._ended = asyncio.Event()
        """Event that is cleared while the trainers have the GPUs (`trainers_turn`), and set
        otherwise."""
        self._ended.set()

    @asynccontextmanager
    async def trainers_turn(
        self, generators: Sequence[GeneratorHandle]
    ) -> AsyncIterator[dict[str, float]]:
        """Context manager: put all generators to sleep, and keep the GPUs for the trainers.

        A running evaluation ends first. Yields two metrics in seconds: `time/wake`, how long the
        slowest generator took to load its weights when it last woke, and `time/sleep`, how long
        the trainers waited until all generators slept.
        """
        async with AsyncExitStack() as held:
            began = time.perf_counter()
            for generator in generators:  # evaluations and pulls hold these locks
                await held.enter_async_context(generator.swapping)
            # In a replay there are no locks: the record has the end of the evaluation before this.
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
        """Put all generators to sleep, including any that restarts in the meantime."""
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
        """Delay a generator's restart: its engine must not start during the trainers' turn."""
        await asyncio.sleep(seconds)
        while not self._ended.is_set():
            await self._ended.wait()
        self._asleep.discard(name)
