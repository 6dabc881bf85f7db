"""The order of a run's scheduling events: free in a live run; a replay brings the recorded one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

Event = dict[str, Any]
"""Name (`event`), `attempt` and fields of one event; a line of receipts.jsonl adds more."""
Listener = Callable[[Event], None]
FORMAT = 4
"""Format version of receipts and schedules."""


class Recording(Protocol):
    """The recorded order that a replay keeps (`grpo_tools/replay/recorded_run.py`)."""

    async def wait_turn(self, event: str, fields: Mapping[str, Any]) -> bool:
        """Wait until an event may happen; return whether the recording has it."""
        ...

    def repeat(self, event: str, fields: Mapping[str, Any]) -> None:
        """Compare an event, whose turn it must be, with the recorded one; go on to the next."""

    def compare(self, event: Event) -> None:
        """Compare what an event trained or loaded with what the recorded one did."""

    def has(self, event: str, **identity: Any) -> bool:
        """Return whether an event is still to come."""
        ...

    def next_batch(self) -> tuple[list[int], list[int]] | None:
        """Return the groups that leave the buffer next: for a step, or as stale."""

    def why_restarted(self) -> str:
        """Return why the role was restarted whose restart is next."""
        ...

    def pulled_again(self, role: str, cause: str, next_try: str) -> bool:
        """Return whether a pull was made again, and not for its group issued anew."""
        ...

    def summary(self) -> str:
        """Return what was repeated; raise an error if it is not all."""
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
        """Wait until an event may happen; in a live run it always may."""
        return self.recording is None or await self.recording.wait_turn(event, identity)

    def record(
        self, event: str, outcome: Mapping[str, Any] | None = None, /, **fields: Any
    ) -> None:
        """Record an ordered event and let the next one happen.

        In a replay, the event's turn must have come: no await may lie between `wait_turn` and this
        call. What is in `outcome` need not be as in the recorded run.
        """
        if self.recording is not None:
            self.recording.repeat(event, fields)
        self.note(event, **fields, **(outcome or {}))

    async def take(self, event: str, **fields: Any) -> None:
        """Wait for the turn of an ordered event and record it; see `record`."""
        await self.wait_turn(event, **fields)
        self.record(event, **fields)

    def note(self, event: str, **fields: Any) -> None:
        """Record an event whose place in the order a replay does not repeat."""
        for listener in self._listeners:
            listener({"event": event, "attempt": self.attempt, **fields})
