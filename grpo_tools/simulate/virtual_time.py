"""An asyncio event loop in virtual time: when all tasks wait, its clock jumps to the next timer."""

from __future__ import annotations

import asyncio
import contextlib
import selectors
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


class DeadlockError(RuntimeError):
    """Every task waits, and no timer is set."""


class _Clock(selectors.SelectSelector):
    """Selector that watches no file: instead of waiting, it advances the time."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise DeadlockError("every task waits, and no timer is set")
        self.now += timeout
        return []


class _VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _Clock()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def run_in_virtual_time(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that waits for no thread, process or file; if stuck, raise DeadlockError."""
    with asyncio.Runner(loop_factory=_VirtualTimeLoop) as runner:
        return runner.run(work)


def now() -> float:
    """Return the virtual seconds since the event loop began."""
    return asyncio.get_running_loop().time()


class BusyTime:
    """Adds up the seconds in which a role works; `count` blocks must not overlap."""

    def __init__(self) -> None:
        self._ended, self._since = 0.0, None

    @contextlib.contextmanager
    def count(self) -> Iterator[None]:
        """Context manager: count the time inside as busy."""
        self._since = now()
        try:
            yield
        finally:
            self._ended, self._since = self.seconds(), None

    def seconds(self) -> float:
        """Return the busy seconds so far, including those of work that is under way."""
        return self._ended + (0.0 if self._since is None else now() - self._since)
