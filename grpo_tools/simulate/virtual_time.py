"""An asyncio event loop in virtual time: when all tasks wait, its clock jumps to the next timer."""

from __future__ import annotations

import asyncio
import contextlib
import selectors
from collections.abc import Coroutine, Iterator, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


class DeadlockError(RuntimeError):
    """Every task waits, and no timer is set."""


class _Clock(selectors.BaseSelector):
    """Selector that watches no file: instead of waiting, it moves the time on."""

    def __init__(self) -> None:
        self.now = 0.0
        self._registered: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = selectors.SelectorKey(fileobj, 0, events, data)
        self._registered[fileobj] = key
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._registered.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise DeadlockError("every task waits, and no timer is set")
        self.now += timeout
        return []

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._registered


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Event loop whose `time` begins at 0 and passes only while all tasks wait.

    Two runs of the same tasks have the same order of events. Nothing in it may wait for a thread,
    a process or a file.
    """

    def __init__(self) -> None:
        self._clock = _Clock()
        super().__init__(self._clock)

    def time(self) -> float:
        """Return the virtual time, in seconds."""
        return self._clock.now


def run_in_virtual_time(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end; it raises DeadlockError if nothing can ever go on."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(work)


class BusyTime:
    """Counts the seconds in which a role works, up to now: a step may be under way."""

    def __init__(self) -> None:
        self._seconds, self._works, self._since = 0.0, 0, 0.0

    @contextlib.contextmanager
    def count(self) -> Iterator[None]:
        """Context manager: the role works; several at once count as one."""
        self.seconds()
        self._works += 1
        try:
            yield
        finally:
            self.seconds()
            self._works -= 1

    def seconds(self) -> float:
        """Return the seconds so far."""
        now = asyncio.get_running_loop().time()
        self._seconds += (now - self._since) * (self._works > 0)
        self._since = now
        return self._seconds
