"""Checks whether a finished run can be replayed with a config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from grpo_components.config.replayed import run_folder
from grpo_components.errors import fail, shown
from grpo_components.exchange.event_order import FORMAT
from grpo_components.records.resume import differences
from grpo_components.rollout.schedule import schedule_file
from grpo_components.settings import Settings
from grpo_tools.replay.recorded_run import read_events

FREE = (
    *("output_dir", "log_level", "replay_events", "gpus_per_generator", "gpus_per_trainer"),
    *("gpus_per_reference", "gpus_per_reward_model", "save_every_n_steps", "metric_logger"),
    *("log_every_n_steps", "log_peak_memory_stats", "profiler", "keep_last_n", "keep_best"),
    *("async_checkpoint", "gpus_per_teacher"),
    *("checkpoint_failure", "reward_workers", "rollouts_logged_per_step", "timeouts"),
    *("log_token_logprobs", "max_generator_kl", "dry_run", "push", "weights"),
    *("replay_until", "resume_from_checkpoint"),
)
"""Keys that a replay may change, because training does not depend on them. `base_model_path` may
also change, to another copy of the same model."""
_ALLOWED = "the output folder of a finished run, or its receipts.jsonl"


def check_replay(settings: Settings, read: Callable[[dict[str, Any]], Settings]) -> None:
    """Refuse a config if it cannot replay the run that its `replay_events` names."""
    until = settings.replay_until
    if settings.replay_events is None:
        if until is not None:
            fail("replay_until", f"{until} given without replay_events", "both, or null")
        return
    if until is not None and until > settings.num_steps:
        fail("replay_until", f"{until} given", f"1 to num_steps ({settings.num_steps})")
    if settings.device != "cpu":
        fail("device", f"{settings.device} given with replay_events", "cpu")
    if settings.resume_from_checkpoint is not False:
        problem = "given with replay_events, which replays a run from its start"
        fail("resume_from_checkpoint", problem, "false")
    run, output_dir = run_folder(settings.replay_events), Path(settings.output_dir).resolve()
    if run.is_relative_to(output_dir):
        fail("output_dir", f"{output_dir} holds the run to replay", "another folder")
    _check_there(run, "config.yaml", "receipts.jsonl")
    before, given = _recorded_config(run, settings, read), settings.model_dump()
    for key, saved, now in differences(before, given):
        fail(key, f"{shown(now)} given, and the run to replay had another", shown(saved))
    names = (schedule_file(Path("logs"), n) for n in range(before["num_generators"]))
    _check_there(run, *map(str, names))
    events = read_events(run)
    if not events or not events[-1].get("finished"):
        fail("replay_events", f"the run in {run} did not finish", _ALLOWED)
    if events[0].get("format") != FORMAT:
        problem = f"the log of {run} has format {events[0].get('format')}"
        fail("replay_events", problem, f"one of this version, format {FORMAT}")
    if any(event.get("attempt", 0) > 0 or event["event"] == "rollback" for event in events):
        problem = f"the run in {run} was resumed or rolled back, and no log has the lost steps"
        fail("replay_events", problem, "a run of one attempt")
    if any(event["event"] == "interrupt" for event in events):
        fail("replay_events", f"the run in {run} lost groups with a node", "one that lost none")
    if lost := [event["role"] for event in events if event.get("given_up")]:
        fail("replay_events", f"the run in {run} gave {lost[0]} up", "one that kept its generators")


def _check_there(run: Path, *names: str) -> None:
    for name in names:
        if not (run / name).is_file():
            fail("replay_events", f"{run} has no {name}", _ALLOWED)


def _recorded_config(
    run: Path, settings: Settings, read: Callable[[dict[str, Any]], Settings]
) -> dict[str, Any]:
    """Return a recorded run's config, with keys in `FREE` and moved paths as in `settings`."""
    given = settings.model_dump()
    saved: Any = OmegaConf.to_container(OmegaConf.load(run / "config.yaml"))
    moved = {saved[key]: given[key] for key in ("base_model_path", "output_dir")}
    before = read(saved).model_dump()
    here = {key: _elsewhere(before[key], moved) for key in given}
    run_path = {saved["output_dir"]: given["output_dir"]}  # in a copy of the run's config
    same = (key for key in given if key in FREE or _elsewhere(given[key], run_path) == here[key])
    return here | {key: given[key] for key in same}


def _elsewhere(value: Any, moved: Mapping[str, str]) -> Any:
    """Replace saved paths in a value by present ones; `moved`: saved path -> present path."""
    if isinstance(value, dict):
        return {key: _elsewhere(item, moved) for key, item in value.items()}
    if isinstance(value, str):
        for before, after in moved.items():
            if value == before or value.startswith(f"{before}/"):
                return after + value[len(before) :]
    return value
