"""Reads a finished run that is to be replayed: its events, and what it trained."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_components.errors import ReplayError
from grpo_components.replay.event_order import Event, EventOrder

FORMAT = 4
"""Format version of receipts and schedules."""


@dataclass(frozen=True)
class Original:
    """What a finished run trained; its replay must train the same."""

    batch_hashes: Mapping[int, str]
    """Step, from 1 -> hash of its batch."""
    checksums: Mapping[int, str]
    """Policy version -> checksum of its weights, as generators loaded them."""

    def check_load(self, event: Event) -> None:
        """Compare the weights of a `load` event with the original's; ignore other events."""
        if event["event"] != "load":
            return
        version, checksum = event["version"], event["checksum"]
        expected = self.checksums.get(version, checksum)
        if checksum != expected:
            raise ReplayError(
                f"the replay diverged before step {version + 1}: its weights of version {version} "
                f"have checksum {checksum}, the original's {expected}"
            )

    def check_batch(self, step: int, batch_hash: str) -> None:
        """Compare the batch of a step with the original's."""
        if self.batch_hashes[step] != batch_hash:
            raise ReplayError(
                f"the replay diverged in step {step}: its batch has the hash {batch_hash}, the "
                f"original's {self.batch_hashes[step]}"
            )


def run_folder(replay_events: str) -> Path:
    """Return the folder of the run; `replay_events` names this folder or the receipts in it."""
    path = Path(replay_events).resolve()
    return path.parent if path.name == "receipts.jsonl" else path


def replayed_run(cfg: Any) -> Path | None:
    """Return the folder of the run that is replayed; None in a live run."""
    return cfg.replay_events and run_folder(cfg.replay_events)


def read_events(run: Path) -> list[Event]:
    """Read all events of a run, in order, each with its number."""
    with (run / "receipts.jsonl").open(encoding="utf-8") as lines:
        return [json.loads(line) | {"number": number} for number, line in enumerate(lines)]


def read_original(replay_events: str) -> Original:
    """Read what the run that `replay_events` names has trained."""
    events = read_events(run_folder(replay_events))
    return Original(
        {e["step"]: e["batch_hash"] for e in events if e["event"] == "step"},
        {e["version"]: e["checksum"] for e in events if e["event"] == "load"},
    )


def read_replayed(cfg: Any) -> Original | None:
    """Read what the run that is replayed has trained; None in a live run."""
    replayed = replayed_run(cfg)
    return read_original(str(replayed)) if replayed else None


def open_event_order(cfg: Any, attempt: int, original: Original | None) -> EventOrder:
    """Open the event order of a run, or of a replay if `cfg.replay_events` names a run."""
    replayed = replayed_run(cfg)
    recorded = None if replayed is None else read_events(replayed)
    listeners = [original.check_load] if original else []
    return EventOrder(attempt, recorded, stall_limit_s(cfg.timeouts.rollout_s), listeners)


def available_cpus(replay_events: str | None) -> int:
    """Return how many CPUs the roles share: as many as this machine has, or the replayed run had.

    It sets the number of threads, which decides how sums are split, and so their last bits.
    """
    if replay_events is not None:
        return read_events(run_folder(replay_events))[0]["cpus"]
    return len(os.sched_getaffinity(0))


def stall_limit_s(rollout_s: float) -> float:
    """Return how long a replay may stand still, in seconds.

    The limit is below the roles' own time-outs, whose errors would not say what was waited for.
    """
    return rollout_s / 2
