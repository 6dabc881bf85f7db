"""Reads a finished run that is to be replayed: its events, its schedules, and its CPUs."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from grpo_components.exchange.event_order import Event
from grpo_components.files import records_of
from grpo_tools.replay.recorded_order import RecordedOrder
from grpo_tools.replay.recorded_schedule import read_schedule


class Replay:
    """What a replay injects into a run: the order of its events, the schedules of its engines.

    The time that a replay may stand still is below the roles' own time-outs, whose errors would not
    say what was waited for.
    """

    def __init__(self, run: Path, rollout_s: float) -> None:
        events, stall_limit_s = read_events(run), rollout_s / 2
        self.cpus: int = events[0]["cpus"]
        """CPUs that the roles shared: they decide how sums are split, and so their last bits."""
        self.order = RecordedOrder(events, stall_limit_s)
        self.read_schedule = partial(read_schedule, str(run / "logs"), stall_limit_s)


def read_events(run: Path) -> list[Event]:
    """Read all events of a run, in order, each with its number."""
    events = records_of(run / "receipts.jsonl")
    return [event | {"number": number} for number, event in enumerate(events)]
