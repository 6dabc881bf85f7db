"""Orders a run's scheduling events: in a replay as recorded, in a live run as they happen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

Event = dict[str, Any]
"""Name (`event`), `attempt` and fields of one event; receipts.jsonl adds a time and a hash."""
Listener = Callable[[Event], None]
FORMAT = 4
"""Version of the file format of receipts and recorded schedules."""


class Recording(Protocol):
    """Interface of the events that a replay must repeat (`grpo_tools/replay/recorded_run.py`)."""

    async def wait_turn(self, event: str, fields: Mapping[str, Any]) -> bool:
        """Wait for an event's recorded turn; return False if no such event is left to repeat."""
        ...

    def repeat(self, event: str, fields: Mapping[str, Any]) -> None:
        """Check that an event equals the next recorded one, and advance to the one after it."""

    def compare(self, event: Event) -> None:
        """Raise a ReplayError if a step's batch or loaded weights differ from the recorded ones."""

    def has(self, event: str, **identity: Any) -> bool:
        """Return whether the recording has this event and the replay has not repeated it yet."""
        ...

    def next_batch(self) -> tuple[list[int], list[int]] | None:
        """Return ids of groups that leave the buffer next: (to train, stale); None if none will."""

    def why_restarted(self) -> str:
        """Return the reason of the next recorded restart."""
        ...

    def summary(self) -> str:
        """Say what was replayed; raise a ReplayError if recorded events are left."""
        ...


class EventOrder:
    """Hands every scheduling event to its listeners; in a replay, in the recorded order only.

    In a live run, an event may happen at any time. In a replay, an event waits for its turn and
    must have the recorded fields; otherwise the replay ends with a ReplayError. All calls come from
    one event loop.
    """

    def __init__(
        self,
        attempt: int = 0,
        recording: Recording | None = None,
        listeners: Iterable[Listener] = (),
    ) -> None:
        self.attempt, self.recording = attempt, recording
        self._listeners = [*([recording.compare] if recording else ()), *listeners]

    def listen(self, listener: Listener) -> None:
        """Add a listener for all further events; it is called after the earlier listeners."""
        self._listeners.append(listener)

    async def wait_turn(self, event: str, **identity: Any) -> bool:
        """In a replay, wait for an event's turn; return False if no such event is left."""
        return self.recording is None or await self.recording.wait_turn(event, identity)

    def record(
        self, event: str, outcome: Mapping[str, Any] | None = None, /, **fields: Any
    ) -> None:
        """Record an ordered event and let the next one happen.

        In a replay, the event's turn must have come: no await may lie between `wait_turn` and this
        call. `outcome` has further fields, which may differ from the recorded run's.
        """
        if self.recording is not None:
            self.recording.repeat(event, fields)
        self.note(event, **fields, **(outcome or {}))

    async def take(self, event: str, **fields: Any) -> None:
        """Wait for the turn of an ordered event and record it; see `record`."""
        await self.wait_turn(event, **fields)
        self.record(event, **fields)

    def note(self, event: str, **fields: Any) -> None:
        """Record an unordered event: a replay does not repeat its place in the order."""
        for listener in self._listeners:
            listener({"event": event, "attempt": self.attempt, **fields})
