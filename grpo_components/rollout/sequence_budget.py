"""Limits how many responses a generator samples at once; a group starts as soon as it fits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class SequenceBudget:
    """Counts the responses that a generator may still begin.

    A response counts from the start of its group until it is scored. So another group may start
    while the longest responses of earlier groups are still sampled. All methods are called on one
    event loop.
    """

    def __init__(self, groups: int, group_size: int) -> None:
        self._free, self._group_size = groups * group_size, group_size
        self._reserved = 0
        self._attempt = 0
        self._changed = asyncio.Event()

    async def reserve(self, patience_s: float) -> int:
        """Wait until a group fits; reserve room for all that fit; return how many (0: timeout)."""
        attempt = self._attempt
        try:
            async with asyncio.timeout(patience_s):
                while self._free < self._group_size and attempt == self._attempt:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return 0
        if attempt != self._attempt:
            return 0
        groups = self._free // self._group_size
        self._free -= groups * self._group_size
        self._reserved += groups
        return groups

    def begin_group(self) -> Callable[[int], None]:
        """Begin a group, which uses up a reservation if there is one.

        Returns a function, to be called with the number of each response that has ended. A group
        whose generator was restarted begins again without a reservation.
        """
        if self._reserved:
            self._reserved -= 1
        else:
            self._free -= self._group_size
        loop, running = asyncio.get_running_loop(), set(range(self._group_size))

        def end(number: int) -> None:
            if number in running:
                running.remove(number)
                self._free += 1
                self._changed.set()

        def end_from_any_thread(number: int) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(end, number)

        return end_from_any_thread

    def begin_attempt(self) -> None:
        """Release all reservations: the run made them before it went back to a checkpoint."""
        self._free += self._reserved * self._group_size
        self._reserved = 0
        self._attempt += 1
        self._changed.set()
