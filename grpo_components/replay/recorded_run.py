"""Replay of a finished run: which runs and configs allow it, and what the original trained."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_components.replay.event_order import Event

FORMAT = 2
"""Of the event log and the schedules."""


@dataclass(frozen=True)
class Original:
    """What a finished run trained, for its replay to be compared with."""

    batch_hashes: dict[int, str]
    """By step, from 1."""
    checksums: dict[int, str]
    """Of the weights that generators loaded, by policy version."""


def run_folder(replay_events: str) -> Path:
    """The folder of the run that `replay_events` names, by itself or by its event log."""
    path = Path(replay_events).resolve()
    return path.parent.parent if path.name == "events.jsonl" else path


def read_events(run: Path) -> list[Event]:
    """All events of a run, in order."""
    return _lines(run / "logs" / "events.jsonl")


def read_original(replay_events: str) -> Original:
    """What the run that `replay_events` names trained."""
    records = _lines(run_folder(replay_events) / "receipts.jsonl")
    return Original(
        {record["step"]: record["batch_hash"] for record in records if record["record"] == "step"},
        {
            pull["version"]: pull["checksum"]
            for record in records
            for pull in record.get("acknowledged", ())
        },
    )


def available_cpus(replay_events: str | None) -> int:
    """CPUs to share among the roles: in a replay those that the original had.

    The number of threads decides how sums are split, and so their last bits.
    """
    if replay_events is not None:
        return read_events(run_folder(replay_events))[0]["cpus"]
    return len(os.sched_getaffinity(0))


def stall_limit_s(rollout_s: float) -> float:
    """How long a replay may stand still, in seconds; below the roles' own time-outs, whose errors
    would not say what the replay waited for.
    """
    return rollout_s / 2


def _lines(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]
