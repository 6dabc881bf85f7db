"""Lets a replay's events happen in the recorded order only, and compares them with the recorded."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpo_components.errors import ReplayError
from grpo_components.exchange.event_order import Event

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


class RecordedOrder:
    """The `Recording` of a finished run."""

    def __init__(self, events: Sequence[Event], timeout_s: float) -> None:
        self._recorded = [event for event in events if _is_ordered(event)]
        self._done = 0
        self._left = Counter(_key(event["event"], event) for event in self._recorded)
        self._timeout_s = timeout_s
        self._moved = asyncio.Event()
        self._waiting: Counter[str] = Counter()
        self._hashes = {e["step"]: e["batch_hash"] for e in events if "batch_hash" in e}
        self._checksums = {e["version"]: e["checksum"] for e in events if e["event"] == "load"}

    async def wait_turn(self, event: str, fields: Mapping[str, Any]) -> bool:
        """Wait until an event may happen; return whether the recording has it."""
        key = _key(event, fields)
        while self._left[key]:
            if _key(self._next["event"], self._next) == key:
                return True
            identity = {name: fields[name] for name in ORDERED[event]}
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
        return False

    def repeat(self, event: str, fields: Mapping[str, Any]) -> None:
        """Compare an event, whose turn it must be, with the recorded one; go on to the next."""
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
        self._moved.set()
        self._moved = asyncio.Event()

    def compare(self, event: Event) -> None:
        """Compare the batch of a step, or the weights of a load, with the recorded ones."""
        if event["event"] == "step":
            step, batch_hash = event["step"], event.get("batch_hash")
            expected = self._hashes.get(step, batch_hash)
            if batch_hash != expected:
                raise ReplayError(
                    f"the replay diverged in step {step}: its batch has the hash {batch_hash}, the "
                    f"original's {expected}"
                )
        if event["event"] == "load":
            version, checksum = event["version"], event["checksum"]
            expected = self._checksums.get(version, checksum)
            if checksum != expected:
                raise ReplayError(
                    f"the replay diverged before step {version + 1}: its weights of version "
                    f"{version} have checksum {checksum}, the original's {expected}"
                )

    def has(self, event: str, fields: Mapping[str, Any]) -> bool:
        """Return whether an event is still to come."""
        return self._left[_key(event, fields)] > 0

    def next(self, matches: Callable[[Event], bool]) -> Event | None:
        """Return the next event that matches."""
        return next((event for event in self._recorded[self._done :] if matches(event)), None)

    def summary(self) -> str:
        """Return how many events were repeated; raise an error if it is not all."""
        if self._done < len(self._recorded):
            left = _describe(self._next["event"], self._next)
            raise ReplayError(f"the replay ended before event {self._next['number']}: {left}")
        return f"{self._done} events in the recorded order"

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
