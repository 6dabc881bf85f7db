"""Lets the trainers and generators of a colocated run take turns on the same GPUs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from grpo_components.cluster.handles import GeneratorHandle, Roles
from grpo_components.errors import RoleLostError
from grpo_components.exchange.ledger import Ledger


def take_turns(roles: Roles, ledger: Ledger) -> Roles:
    """Return the handles of a colocated run: its trainers and generators take turns from now on."""
    Turns(roles, ledger)
    return roles


class Turns:
    """Puts all generators to sleep while the trainers train or load a checkpoint.

    A generator that slept has no weights, so that the next group or evaluation pulls, which wakes
    it. Nothing can pull before the step is over: its groups are all there, and the staleness
    contract lets the next ones start only with the weights that the step makes. (After a skipped
    step they start with the same weights, which are pulled once more.)
    """

    def __init__(self, roles: Roles, ledger: Ledger) -> None:
        self._generators, self._ledger = roles.generators, ledger
        self._asleep: set[str] = set()
        """Names of the generators whose process sleeps, or ended while it slept."""
        self._ended = asyncio.Event()
        """Cleared during the trainers' turn."""
        self._ended.set()
        roles.trainers.turn = self.of_trainers
        for generator in roles.generators:
            generator.role.pause = partial(self._pause, generator.name)

    @asynccontextmanager
    async def of_trainers(self) -> AsyncIterator[dict[str, float]]:
        """Context manager: the trainers have the GPUs; entered once every generator sleeps.

        It first waits for a running evaluation. It gives the metrics `time/wake`, the longest load
        that woke a generator before, and `time/sleep`, seconds until all slept.
        """
        async with AsyncExitStack() as held:
            began = time.perf_counter()
            for generator in self._generators:  # an evaluation holds these, and so does a pull
                await held.enter_async_context(generator.swapping)
            # In a replay the locks are open: the evaluation's end comes before this in the record.
            await self._ledger.events.take("sleep", step=self._ledger.steps_done + 1)
            running = [entry.group_id for entry in self._ledger.in_state("in_flight")]
            assert not running, f"groups {running} run, and the trainers begin their turn"
            loads_s = max(generator.load_s for generator in self._generators)
            await self._put_to_sleep()
            self._ended.clear()
            try:
                yield {"time/wake": loads_s, "time/sleep": time.perf_counter() - began}
            finally:
                self._ended.set()

    async def _put_to_sleep(self) -> None:
        """Return once all generators sleep, those too that restarted while others fell asleep."""
        self._asleep.clear()
        while awake := self._awake():
            await asyncio.gather(*map(self._sleep, awake))

    def _awake(self) -> Sequence[GeneratorHandle]:
        return [g for g in self._generators if not g.lost and g.name not in self._asleep]

    async def _sleep(self, generator: GeneratorHandle) -> None:
        try:
            if aborted := await generator.sleep():
                self._ledger.events.note("abort", role=generator.name, responses=aborted)
        except RoleLostError:
            return
        self._asleep.add(generator.name)

    async def _pause(self, name: str, seconds: float) -> None:
        """Wait before a generator restarts: its engine must not start on the trainers' GPU."""
        await asyncio.sleep(seconds)
        while not self._ended.is_set():
            await self._ended.wait()
        self._asleep.discard(name)
