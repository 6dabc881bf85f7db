"""Places for programs that run at a time; a greedy caller's queue does not hold up the others."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import threading
import time
from collections.abc import Iterator


class FairPlaces:
    """Hands each free place to the caller that came first, its time counted later by what it used.

    So a caller that has used 8 s waits for all that come in the 8 s after it, and nobody waits for
    ever.

    Args:
        count: places.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: list[tuple[float, int]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()

    @property
    def waiting(self) -> int:
        """Callers without a place."""
        return len(self._waiting)

    @contextlib.contextmanager
    def place(self, used_s: float, timeout_s: float) -> Iterator[None]:
        """Have a place for the time of a `with` block.

        Args:
            used_s: seconds that the caller has had places before.
            timeout_s: longest wait.

        Raises:
            TimeoutError: if no place was free in time.
        """
        ticket = time.monotonic() + used_s, next(self._numbers)
        with self._changed:
            heapq.heappush(self._waiting, ticket)
            is_next = self._changed.wait_for(
                lambda: self._free > 0 and self._waiting[0] == ticket, timeout_s
            )
            self._waiting.remove(ticket)
            heapq.heapify(self._waiting)
            self._free -= is_next
            self._changed.notify_all()
        if not is_next:
            raise TimeoutError
        try:
            yield
        finally:
            with self._changed:
                self._free += 1
                self._changed.notify_all()
