"""A queue for a few slots in which a heavy user cannot hold up other users."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import threading
import time
from collections.abc import Iterator


class FairQueue:
    """Limits how many callers run at a time; the next slot goes to the earliest ticket.

    A ticket is a time: the caller's arrival plus the seconds for which it has held slots before. A
    caller that has held slots for 8 s therefore gives way to new callers for 8 s, and nobody waits
    forever.
    """

    def __init__(self, num_slots: int) -> None:
        self._free = num_slots
        self._waiting: list[tuple[float, int]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()

    @property
    def num_waiting(self) -> int:
        """Number of callers that wait for a slot."""
        return len(self._waiting)

    @contextlib.contextmanager
    def slot(self, used_s: float, timeout_s: float) -> Iterator[None]:
        """Context manager: wait for a slot, and hold it during the `with` block."""
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
