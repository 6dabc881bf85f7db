"""The order of a run's scheduling events: free in a live run, fixed in a replay."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from grpo_components.errors import ReplayError

Event = dict[str, Any]
"""Name (`event`), `attempt` and fields of one event; a line of receipts.jsonl adds more."""
Listener = Callable[[Event], None]

ORDERED: Mapping[str, tuple[str, ...]] = {
    "issue": ("role",),
    "pull": ("role", "cause"),
    "finish": ("group",),
    "buffer": ("group",),
    "drop": ("groups",),
    "sample": ("step",),
    "sleep": ("step",),
    "push": ("version",),
    "publish": ("version",),
    "step": ("step",),
    "evaluate": ("role", "step"),
    "restart": ("role",),
}
"""Events that a replay keeps in the recorded order, each with the fields that identify it."""
ENVELOPE = ("event", "number", "attempt", "time", "chain")
"""What every event that is read has besides its own fields."""
_MAX_WAITERS_SHOWN = 8


class EventOrder:
    """Hands every scheduling event to its listeners; in a replay, in the recorded order only.

    In a live run, an event may happen at any time. In a replay, an event waits for its turn and
    must have the recorded fields; otherwise the replay ends with a ReplayError. All calls come from
    one event loop.
    """

    def __init__(
        self,
        attempt: int = 0,
        recorded: Sequence[Event] | None = None,
        timeout_s: float = 0.0,
        listeners: Iterable[Listener] = (),
    ) -> None:
        self.attempt = attempt
        self.replaying = recorded is not None
        """Whether this is a replay."""
        self._recorded = [event for event in recorded or () if _is_ordered(event)]
        self._done = 0
        self._left = Counter(_key(event["event"], event) for event in self._recorded)
        self._timeout_s, self._listeners = timeout_s, list(listeners)
        self._moved = asyncio.Event()
        self._waiting: Counter[str] = Counter()

    def listen(self, listener: Listener) -> None:
        """Add a listener for all further events; it is called after the earlier listeners."""
        self._listeners.append(listener)

    async def wait_turn(self, event: str, **identity: Any) -> bool:
        """Wait until an event may happen; in a live run it always may."""
        key = _key(event, identity)
        while self.replaying and self._left[key]:
            if _key(self._next["event"], self._next) == key:
                return True
            waiter, moved = _describe(event, identity), self._moved
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

    def replay_wait(self, event: str, **identity: Any) -> Callable[[], Awaitable[bool]] | None:
        """Return a function that waits for the turn of an event in a replay; None in a live run.

        It is for callers that have to watch something else while they wait.
        """
        return partial(self.wait_turn, event, **identity) if self.replaying else None

    def record(
        self, event: str, outcome: Mapping[str, Any] | None = None, /, **fields: Any
    ) -> None:
        """Record an ordered event and let the next one happen.

        In a replay, the event's turn must have come: no await may lie between `wait_turn` and this
        call. What is in `outcome` is recorded, but not compared with the recorded run.
        """
        if self.replaying:
            expected = self._next if self._done < len(self._recorded) else {"event": "its end"}
            recorded = {name: value for name, value in expected.items() if name in fields}
            if event != expected["event"] or fields != recorded:
                raise ReplayError(
                    f"the replay diverged at event {expected.get('number', self._done)}: the "
                    f"recorded run had {_describe(expected['event'], recorded)}, the replay has "
                    f"{_describe(event, fields)}"
                )
            self._left[_key(event, fields)] -= 1
            self._done += 1
        self.note(event, **fields, **(outcome or {}))
        self._moved.set()
        self._moved = asyncio.Event()

    async def take(self, event: str, **fields: Any) -> None:
        """Wait for the turn of an ordered event and record it; see `record`."""
        await self.wait_turn(event, **{name: fields[name] for name in ORDERED[event]})
        self.record(event, **fields)

    def note(self, event: str, **fields: Any) -> None:
        """Record an event whose place in the order a replay does not repeat."""
        for listener in self._listeners:
            listener({"event": event, "attempt": self.attempt, **fields})

    def should_happen(self, event: str, default: bool, **identity: Any) -> bool:
        """Return `default` in a live run; in a replay, whether the event is to be repeated."""
        return self._left[_key(event, identity)] > 0 if self.replaying else default

    def next_recorded(self, matches: Callable[[Event], bool]) -> Event | None:
        """Return the next recorded event that matches; None in a live run, or if none is left."""
        return next((event for event in self._recorded[self._done :] if matches(event)), None)

    def lock(self) -> contextlib.AbstractAsyncContextManager[Any]:
        """Return a lock; in a replay one that never locks, since the recorded order replaces it."""
        return contextlib.nullcontext() if self.replaying else asyncio.Lock()

    def summary(self) -> str:
        """Return how many events a replay has repeated to its end; empty for a live run."""
        if self._done < len(self._recorded):
            left = _describe(self._next["event"], self._next)
            raise ReplayError(f"the replay ended before event {self._next['number']}: {left}")
        return f"{self._done} events in the recorded order" if self.replaying else ""

    @property
    def _next(self) -> Event:
        return self._recorded[self._done]

    def _stalled(self) -> str:
        waiting = [waiter for waiter, count in self._waiting.items() if count]
        shown = "; ".join(sorted(waiting)[:_MAX_WAITERS_SHOWN])
        return (
            f"the replay stands still: for {self._timeout_s:g} s nothing happened, and the next "
            f"event is number {self._next['number']}, "
            f"{_describe(self._next['event'], self._next)}; waiting for their turn: {shown}"
        )


def _is_ordered(event: Event) -> bool:
    """Return whether a replay must repeat an event's place in the order.

    Of restarts, it must repeat only a generator's, which loses the responses being sampled. Other
    roles give the same answers to the same calls, however often they are restarted.
    """
    if event["event"] == "restart":
        return event["role"].startswith("generator_")
    return event["event"] in ORDERED


def _key(event: str, fields: Mapping[str, Any]) -> tuple[Any, ...]:
    values = (fields[name] for name in ORDERED[event])
    return event, *(tuple(value) if isinstance(value, list) else value for value in values)


def _describe(event: str, fields: Mapping[str, Any]) -> str:
    shown = (f"{name} {value}" for name, value in fields.items() if name not in ENVELOPE)
    return f"{event} ({', '.join(shown)})"
