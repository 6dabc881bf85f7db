"""Plans a what-if: a recorded run is repeated up to a step, and goes on with other keys."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from grpo_components.config.cross_checks import needs_reference
from grpo_components.config.reading import read_settings
from grpo_components.config.replay_check import differences, recorded_config
from grpo_components.errors import fail, shown
from grpo_components.records.resume import FIXED, KL_SECTIONS, find_checkpoint
from grpo_components.replay.recorded_run import read_json_lines, run_folder
from grpo_components.settings import Settings
from grpo_components.state_files import read_state
from grpo_components.what_if import WhatIf

_OF_ROLES = (
    *("device", "num_generators", "num_trainers", "num_references", "num_teachers", "cpu_threads"),
    *("ray", "tensor_parallel_dim", "data_parallel_replicate_dim", "colocate"),
)
"""Keys that decide how processes share the sums, and so their last bits."""
_OF_STEPS = (
    *("loss", "advantages", "aggregation", "off_policy", "ptx", "optimizer", "lr_scheduler"),
    *("clip_grad_norm", "ppo_epochs", "updates_per_batch", "tokens_per_micro_batch"),
    *("mask_overlong", "teacher.coeff", "max_skipped_steps", "reward_shaping.kl_coeff"),
    *("reward_shaping.overlong_tokens", "reward_shaping.overlong_penalty"),
    *("num_steps", "eval_every_n_steps"),
)
"""Keys that do not decide which batch a training step gets."""
_SHOWN_GROUPS = 20


def check_what_if(settings: Settings) -> Settings:
    """Refuse a what-if that is impossible, and return the settings of its first part."""
    until, without = settings.replay_until, settings.replay_without
    if settings.replay_events is None or until is None:
        for key, value in (("replay_until", until), ("replay_without", without or None)):
            if value is not None:
                needed = "replay_events" if settings.replay_events is None else "replay_until"
                fail(key, f"{shown(value)} given without {needed}", f"both, or no {key}")
        return settings
    run = run_folder(settings.replay_events)
    before, given = recorded_config(run, settings), settings.model_dump()
    most = min(before["num_steps"], settings.num_steps) - 1
    if until > most:
        fail("replay_until", f"{until} given, and no step follows it", f"0 to {most}")
    changed = [key for key, _, _ in differences(before, given)]
    _check_keys(changed, before, given)
    trained_in = _trained_in(run, after=until)
    for group in without:
        if group not in trained_in:
            problem = f"{group} given, which {run} did not train after step {until}"
            fail("replay_without", problem, _listed(trained_in))
    if settings.resume_from_checkpoint is not False:
        _check_continued(settings, until)
        return settings
    if not changed and not without:  # it stays equal to the end
        return settings
    of_steps = all(_is_of(key, _OF_STEPS) for key in changed)
    follows = of_steps and not settings.curriculum and not settings.replay_generation
    step = until + 1 if changed else min(trained_in[group] for group in without)
    changed += ["replay_without"] if without else []
    first = read_settings(before)
    first._what_if = WhatIf(step, follows, tuple(changed), settings)
    return first


def left_out(cfg: Settings) -> frozenset[int]:
    """Return the groups that are not trained; none while a what-if repeats the recorded run."""
    return frozenset(() if cfg.what_if else cfg.replay_without)


def _check_keys(changed: Iterable[str], before: Any, given: Any) -> None:
    for key in changed:
        saved = shown(_at(before, key))
        if _is_of(key, FIXED):
            fail(key, "cannot change with replay_until: the state depends on it", saved)
        if _is_of(key, _OF_ROLES):
            fail(key, "cannot change with replay_until: the roles go on", saved)
    for key in KL_SECTIONS:
        if needs_reference(before[key]) != needs_reference(given[key]):
            problem = "cannot change to or from 0 with replay_until: it starts no other roles"
            fail(f"{key}.kl_coeff", problem, shown(before[key].get("kl_coeff", 0)))
    for key in ("teacher", "reward_model.path"):
        if (_at(before, key) is None) != (_at(given, key) is None):
            problem = "cannot change to or from null with replay_until: it starts no other roles"
            fail(key, problem, shown(_at(before, key)))


def _check_continued(settings: Settings, until: int) -> None:
    """Refuse to go on from a checkpoint of the part that repeats the recorded run."""
    checkpoint = find_checkpoint(settings.resume_from_checkpoint, Path(settings.output_dir))
    assert checkpoint is not None, "it is given"
    done = read_state(checkpoint / "state", "driver")["ledger"]["steps_done"]
    if done < until:
        problem = f"{checkpoint} is of step {done}, before the step of replay_until"
        fail("resume_from_checkpoint", problem, f"a checkpoint after step {until}, or false")


def _trained_in(run: Path, after: int) -> dict[int, int]:
    """Return the step that first trained each group of a run, of the steps after a given one."""
    steps = [line for line in read_json_lines(run / "receipts.jsonl") if line["record"] == "step"]
    return {
        group["group_id"]: line["step"]
        for line in steps
        for group in line["trained"]
        if line["step"] > after
    }


def _listed(groups: Iterable[int]) -> str:
    numbers = sorted(groups)
    more = len(numbers) - _SHOWN_GROUPS
    return ", ".join(map(str, numbers[:_SHOWN_GROUPS])) + (f" and {more} more" if more > 0 else "")


def _is_of(key: str, family: Iterable[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in family)


def _at(values: Any, key: str) -> Any:
    for name in key.split("."):
        values = values.get(name) if isinstance(values, dict) else None
    return values
