"""Keeps a replay in the recorded order of the run's events and of each engine's commands."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from threading import Condition
from typing import Any

from grpo_components.errors import ReplayError
from grpo_components.exchange.event_order import Event
from grpo_components.exchange.weight_probe import PROBE_TOKENS
from grpo_components.files import records_of
from grpo_components.rollout.schedule import STOP, Arrived, schedule_file

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
"""Fields that every event read from a file has; its other fields depend on its name."""
_MAX_SHOWN = 8


class RecordedOrder:
    """The event order of a finished run, for a replay to repeat (a `Recording`)."""

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
        """Wait for an event's recorded turn; return False if no such event is left to repeat."""
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
        """Check that an event equals the next recorded one, and advance to the one after it."""
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
        """Raise a ReplayError if a step's batch or loaded weights differ from the recorded ones."""
        if event["event"] == "step":
            step = event["step"]
            what = f"in step {step}: its batch has the hash"
            _check_same(what, event.get("batch_hash"), self._hashes.get(step))
        elif event["event"] == "load":
            version = event["version"]
            what = f"before step {version + 1}: its weights of version {version} have checksum"
            _check_same(what, event["checksum"], self._checksums.get(version))

    def has(self, event: str, **identity: Any) -> bool:
        """Return whether the event is in the recording and not yet repeated."""
        return self._left[_key(event, identity)] > 0

    def next_batch(self) -> tuple[list[int], list[int]] | None:
        """Return ids of groups that leave the buffer next: (to train, stale); None if none will."""
        for event in islice(self._recorded, self._done, None):
            if event["event"] == "sample":
                return event["groups"], []
            if event["event"] == "drop" and event["reason"] == "stale":
                return [], event["groups"]
        return None

    def why_restarted(self) -> str:
        """Return the reason of the next recorded restart."""
        return self._next["what"]

    def summary(self) -> str:
        """Say how many events were replayed; raise a ReplayError if recorded events are left."""
        if self._done < len(self._recorded):
            left = _describe(self._next["event"], self._next)
            raise ReplayError(f"the replay ended before event {self._next['number']}: {left}")
        return f"{self._done} events in the recorded order"

    @property
    def _next(self) -> Event:
        return self._recorded[self._done]

    def _stalled(self) -> str:
        waiting = [waiter for waiter, count in self._waiting.items() if count]
        shown = "; ".join(sorted(waiting)[:_MAX_SHOWN])
        return (
            f"the replay stands still: for {self._timeout_s:g} s nothing happened, and the next "
            f"event is number {self._next['number']}, "
            f"{_describe(self._next['event'], self._next)}; waiting for their turn: {shown}"
        )


def _check_same(what: str, given: Any, recorded: Any) -> None:
    if recorded not in (None, given):
        raise ReplayError(f"the replay diverged {what} {given}, the original's {recorded}")


def _is_ordered(event: Event) -> bool:
    """Return whether a replay must repeat the event in recorded order."""
    if event["event"] == "restart":  # other roles answer as before, a generator loses responses
        return event["role"].startswith("generator_")
    return event["event"] in ORDERED


def _key(event: str, fields: Mapping[str, Any]) -> tuple[Any, ...]:
    values = (fields[name] for name in ORDERED[event])
    return event, *(tuple(value) if isinstance(value, list) else value for value in values)


def _describe(event: str, fields: Mapping[str, Any]) -> str:
    shown = (f"{name} {value}" for name, value in fields.items() if name not in ENVELOPE)
    return f"{event} ({', '.join(shown)})"


class RecordedSchedule:
    """Gives a replayed engine its commands before the same steps as in the recorded run."""

    def __init__(
        self,
        entries: Iterable[tuple[int, str]],
        timeout_s: float,
        *,
        killed: bool = False,
        probe_tokens: int = PROBE_TOKENS,
    ) -> None:
        self.probe_tokens = probe_tokens
        self._entries = deque(entries)
        self._left = Counter(name for _, name in self._entries)
        self._timeout_s, self._killed = timeout_s, killed

    def expect(self, name: str) -> None:
        """Refuse a command that the recorded engine did not get."""
        if self._killed:  # it may have got commands that it did not record
            return
        if not self._left[name]:
            raise ReplayError(f"the recorded run had no {name} here (any more)")
        self._left[name] -= 1

    def choose(self, arrived: Arrived, changed: Condition, step: int, idle: bool) -> int | None:
        """Wait for the command due before a step, if any; return its index in `arrived` or None."""
        entries = self._entries
        due_step, due_name = entries[0] if entries else (step, STOP)

        def index_of(wanted: str) -> int | None:
            return next((i for i, (name, _) in enumerate(arrived) if name == wanted), None)

        if due_step > step or not (entries or idle):
            if entries and idle and index_of(STOP) is None:
                raise ReplayError(
                    f"the engine ran dry before its step {step}; the recorded one went on until "
                    f"{due_name} entered before step {due_step}"
                )
            return index_of(STOP)

        def is_there() -> bool:
            return index_of(due_name) is not None or index_of(STOP) is not None

        # After the last recorded command, wait without limit for the command that ends the engine.
        if not changed.wait_for(is_there, self._timeout_s if entries else None):
            queued = ", ".join(name for name, _ in list(arrived)[:_MAX_SHOWN])
            raise ReplayError(
                f"the engine waited {self._timeout_s:g} s for {due_name} before its step {step}; "
                f"queued: {queued or 'nothing'}"
            )
        if (index := index_of(STOP)) is None:
            entries.popleft()
            index = index_of(due_name)
        return index


def read_schedule(
    folder: str, timeout_s: float, number: int = 0, restart_count: int = 0
) -> RecordedSchedule:
    """Read the commands that generator `number` took after `restart_count` restarts."""
    by_restart: dict[int, list[tuple[int, str]]] = {}
    probe_tokens = PROBE_TOKENS
    entered: list[tuple[int, str]] = []
    for line in records_of(schedule_file(Path(folder), number)):
        if "life" in line:
            entered = by_restart[line["life"]] = []
            probe_tokens = line["probe_tokens"]
        else:
            entered += [(line["step"], name) for name in line["entered"]]
    # A process that ended before its engine was built left no commands.
    entries = by_restart.get(restart_count, [])
    killed = restart_count < max(by_restart, default=0)
    return RecordedSchedule(entries, timeout_s, killed=killed, probe_tokens=probe_tokens)


class Replay:
    """Reads from a finished run what a replay repeats: order of events, engine schedules."""

    def __init__(self, run: Path, rollout_s: float) -> None:
        # The limit is below the roles' time-outs, whose errors would not say what was awaited.
        events, stall_limit_s = read_events(run), rollout_s / 2
        self.cpus: int = events[0]["cpus"]
        """CPUs that the roles shared: they decide how sums are split, and so their last bits."""
        self.order = RecordedOrder(events, stall_limit_s)
        self.read_schedule = partial(read_schedule, str(run / "logs"), stall_limit_s)


def read_events(run: Path) -> list[Event]:
    """Read all events of a run, in order, each with its number."""
    events = records_of(run / "receipts.jsonl")
    return [event | {"number": number} for number, event in enumerate(events)]
