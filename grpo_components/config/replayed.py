"""Builds the replay of a recorded run if a config names one; only then imports the replay tool."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_components.machine import usable_cpus
from grpo_components.settings import Settings

if TYPE_CHECKING:
    from grpo_tools.replay.recorded_run import Replay


def run_folder(replay_events: str) -> Path:
    """Return the folder of the run to replay; `replay_events` names it, or its receipts.jsonl."""
    path = Path(replay_events).resolve()
    return path.parent if path.name == "receipts.jsonl" else path


def replay_of(cfg: Settings) -> Replay | None:
    """Read the recorded run that this run repeats; None if `replay_events` is null."""
    if cfg.replay_events is None:
        return None
    from grpo_tools.replay.recorded_run import Replay

    return Replay(run_folder(cfg.replay_events), cfg.timeouts.rollout_s)


def check_replay(cfg: Settings, read: Callable[[Mapping[str, Any]], Settings]) -> None:
    """Refuse `replay_events` if this config cannot repeat the recorded run that it names."""
    if cfg.replay_events is not None or cfg.replay_until is not None:
        from grpo_tools.replay import check

        check.check_replay(cfg, read)


def available_cpus(cfg: Settings) -> int:
    """Return how many CPUs the roles share: this machine's or, in a replay, the recorded run's.

    This number decides how many threads share a sum, and so the last bits of the sum.
    """
    replay = replay_of(cfg)
    return replay.cpus if replay else usable_cpus()
