"""Turns: scheduling events written down as they happen, or made to happen as they once did."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TextIO

from grpo_components.errors import ReplayError

Event = dict[str, Any]
"""One line of the event log."""

ORDERED: Mapping[str, tuple[str, ...]] = {
    "issue": ("role",),
    "pull": ("role", "cause"),
    "finish": ("group",),
    "buffer": ("group",),
    "drop": ("groups",),
    "sample": ("step",),
    "push": ("version",),
    "publish": ("version",),
    "step": ("step",),
    "evaluate": ("role", "step"),
    "restart": ("role",),
}
"""Events whose order a replay keeps, each with the fields that say whose turn it is."""
_ENVELOPE = ("event", "number", "attempt", "time")
_SHOWN_WAITING = 8


class Turns:
    """Tells of every scheduling event; in a replay it also holds each back until it is its turn.

    A new run's events happen at once. A replay's happen in the recorded order, with the recorded
    fields, or end with a ReplayError. All calls come from one event loop.

    Args:
        file: gets one JSON object per event, flushed; None writes nothing.
        attempt: which life of the run.
        recorded: the events of the run to replay; None for a new run.
        timeout_s: longest time without any event while someone waits for a turn.
    """

    def __init__(
        self,
        file: TextIO | None = None,
        attempt: int = 0,
        recorded: Sequence[Event] | None = None,
        timeout_s: float = 0.0,
    ) -> None:
        self._file, self._timeout_s = file, timeout_s
        self.attempt = attempt
        self._number = 0
        self.replaying = recorded is not None
        """Whether the order of events is given."""
        self._recorded = [event for event in recorded or () if _is_ordered(event)]
        self._done = 0
        self._left = Counter(_key(event["event"], event) for event in self._recorded)
        self._moved = asyncio.Event()
        self._waiting: Counter[str] = Counter()
        self.pinnings = 0
        """Beginnings and ends of `pinning`."""

    async def turn(self, event: str, **concerns: Any) -> bool:
        """Wait until it is the turn of an event; a new run's turn is always now.

        Args:
            event: one of `ORDERED`.
            concerns: the fields that say whose turn it is.

        Returns:
            Whether the turn has come; False in a replay whose run had no more such events.

        Raises:
            ReplayError: if nothing happens for `timeout_s`; it names the next event and all who
                wait.
        """
        key = _key(event, concerns)
        while self.replaying and self._left[key]:
            if _key(self._next["event"], self._next) == key:
                return True
            waiter, moved = _words(event, concerns), self._moved
            self._waiting[waiter] += 1
            try:
                # asyncio.timeout, unlike wait_for, lets no other task run before it returns.
                async with asyncio.timeout(self._timeout_s):
                    await moved.wait()
            except TimeoutError:
                raise ReplayError(self._stalled()) from None
            finally:
                self._waiting[waiter] -= 1
        return not self.replaying

    def awaited(self, event: str, **concerns: Any) -> Callable[[], Awaitable[bool]] | None:
        """The `turn` of an event, for who has to do more while waiting; None in a new run."""
        return partial(self.turn, event, **concerns) if self.replaying else None

    def happened(self, event: str, **fields: Any) -> None:
        """Tell of an ordered event, without an await since its `turn`, and let the next one happen.

        Raises:
            ReplayError: if the recorded run had another event here.
        """
        if self.replaying:
            expected = self._next if self._done < len(self._recorded) else {"event": "its end"}
            recorded = {name: expected[name] for name in expected if name not in _ENVELOPE}
            if event != expected["event"] or fields != recorded:
                raise ReplayError(
                    f"the replay diverged at event {expected.get('number', self._done)}: the "
                    f"recorded run had {_words(expected['event'], recorded)}, the replay has "
                    f"{_words(event, fields)}"
                )
            self._left[_key(event, fields)] -= 1
            self._done += 1
        self.note(event, **fields)
        self._moved.set()
        self._moved = asyncio.Event()

    async def take(self, event: str, **fields: Any) -> None:
        """Wait for the turn of an ordered event and tell of it."""
        await self.turn(event, **{name: fields[name] for name in ORDERED[event]})
        self.happened(event, **fields)

    def note(self, event: str, **fields: Any) -> None:
        """Tell of an event that no replay waits for."""
        if self._file is not None:
            envelope = {"event": event, "number": self._number, "attempt": self.attempt}
            line = json.dumps({**envelope, **fields, "time": round(time.time(), 6)})
            self._file.write(line + "\n")
            self._file.flush()
        self._number += 1

    def decided(self, event: str, default: bool, **concerns: Any) -> bool:
        """Whether an event shall happen: as a new run finds, or as the recorded one had it.

        Args:
            event: one of `ORDERED`.
            default: what a new run finds.
            concerns: the fields that say whose turn it is.
        """
        return self._left[_key(event, concerns)] > 0 if self.replaying else default

    def upcoming(self, wanted: Callable[[Event], bool]) -> Event | None:
        """The next recorded event of some kind; None in a new run, or where none is left."""
        return next((event for event in self._recorded[self._done :] if wanted(event)), None)

    @contextlib.contextmanager
    def pinning(self) -> Iterator[None]:
        """Keep the generators' weights, for an evaluation: no wait for newer ones times out."""
        self.pinnings += 1
        try:
            yield
        finally:
            self.pinnings += 1

    @property
    def pinned(self) -> bool:
        """Whether an evaluation keeps the generators' weights now."""
        return self.pinnings % 2 == 1

    def lock(self) -> contextlib.AbstractAsyncContextManager[Any]:
        """A lock of a new run; nothing in a replay, whose order it could only contradict."""
        return contextlib.nullcontext() if self.replaying else asyncio.Lock()

    def outcome(self) -> str:
        """What a replay has shown, at its end; empty for a new run.

        Raises:
            ReplayError: if events of the recorded run never happened.
        """
        if self._done < len(self._recorded):
            last = _words(self._next["event"], self._next)
            raise ReplayError(f"the replay ended before event {self._next['number']}: {last}")
        return f"{self._done} events in the recorded order" if self.replaying else ""

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    @property
    def _next(self) -> Event:
        return self._recorded[self._done]

    def _stalled(self) -> str:
        waiting = [waiter for waiter, count in self._waiting.items() if count]
        shown = "; ".join(sorted(waiting)[:_SHOWN_WAITING])
        return (
            f"the replay stands still: for {self._timeout_s:g} s nothing happened, and the next "
            f"event is number {self._next['number']}, {_words(self._next['event'], self._next)}; "
            f"waiting for their turn: {shown}"
        )


def _is_ordered(event: Event) -> bool:
    """What a generator was sampling in its earlier life shapes what comes; other roles' lives do
    not: the same calls have the same answers in each.
    """
    if event["event"] == "restart":
        return event["role"].startswith("generator_")
    return event["event"] in ORDERED


def _key(event: str, fields: Mapping[str, Any]) -> tuple[Any, ...]:
    values = (fields[name] for name in ORDERED[event])
    return event, *(tuple(value) if isinstance(value, list) else value for value in values)


def _words(event: str, fields: Mapping[str, Any]) -> str:
    said = (f"{name} {value}" for name, value in fields.items() if name not in _ENVELOPE)
    return f"{event} ({', '.join(said)})"
