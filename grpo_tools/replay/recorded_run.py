"""Reads a finished run that is to be replayed: its events, its schedules, and its CPUs."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from grpo_components.exchange.event_order import Event
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
    events = read_json_lines(run / "receipts.jsonl")
    return [event | {"number": number} for number, event in enumerate(events)]


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read the JSON objects of a file that has one per line."""
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]
