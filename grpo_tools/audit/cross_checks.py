"""Compares receipts.jsonl (a run's events) with the run's configs, metrics and checkpoints."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from grpo_components.files import records_of
from grpo_components.records.checkpoint_folder import saved_steps
from grpo_components.state_files import read_state
from grpo_components.trajectory import batch_hash
from grpo_tools.audit.choices import Record

Check = Callable[[str, bool, str], Any]


def config_path(folder: Path, attempt: int) -> Path:
    """Return the path of an attempt's config.

    The run's last process wrote `config.yaml`; an earlier process whose last attempt was n wrote
    `config_attempt_<n>.yaml`. A rollback begins an attempt in the same process, with its config.
    """
    paths = {int(p.stem.rpartition("_")[2]): p for p in folder.glob("config_attempt_*.yaml")}
    later = [number for number in sorted(paths) if number >= attempt]
    return paths[later[0]] if later else folder / "config.yaml"


def read_config(path: Path) -> dict[str, Any]:
    """Read a saved config."""
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def check_config(folder: Path, start: Record, last_attempt: int, check: Check) -> None:
    """Compare the settings in a start record with the attempt's config, if `folder` has it."""
    path = config_path(folder, start["attempt"])
    config = read_config(path) if path.exists() else {}
    has_earlier = any(folder.glob("config_attempt_*.yaml"))
    # A run that resumed in a new folder has a single config here, that of its last attempt.
    only_last = config.get("resume_from_checkpoint") and not has_earlier
    if only_last and start["attempt"] < last_attempt:
        return
    for key in start.keys() & config.keys():
        stated, setting = start[key], config[key]
        if isinstance(stated, dict):
            section = setting or {}
            setting = {name: float(section.get(name, "nan")) for name in stated}
        elif key == "num_steps" and config.get("eval_only"):
            setting = 0
        check("config", stated == setting, f"{key} is {stated}, but {setting} in the config")


def read_metrics(folder: Path) -> dict[tuple[int, int], Record]:
    """Return (attempt, step) -> the metrics of that step in `logs/metrics.jsonl`."""
    return {
        (record["attempt"], record["step"]): record
        for record in records_of(folder / "logs" / "metrics.jsonl")
        if record.get("step", 0) > 0
    }


def check_metrics(known: dict[tuple[int, int], Record], record: Record, check: Check) -> None:
    """Compare a step's receipt with its logged metrics, and remove these metrics from `known`."""
    attempt, step = record["attempt"], record["step"]
    metrics = known.pop((attempt, step), None)
    if metrics is None:
        if any(a == attempt and n > step for a, n in known):
            check("metrics", False, "logs/metrics.jsonl has later steps but not this one")
        return
    for key, value in _measured(record).items():
        if key in metrics:
            same = _same(metrics[key], value)
            check("metrics", same, f"{key} is {value}, but {metrics[key]} in the metrics")


def _measured(record: Record) -> dict[str, float | None]:
    """Compute from a step's receipt the metrics that the log should have."""
    counts = {int(version): n for version, n in record["token_versions"].items()}
    tokens, start = sum(counts.values()), record["trained_from"]
    versions = sum(version * n for version, n in counts.items())
    oldest = start - min(counts) if counts else 0
    return {
        "policy_version": record["policy_version"],
        "rollout/trained_tokens": tokens,
        "staleness/max": oldest,
        "staleness/mean": start - versions / tokens if tokens else None,
        "off_policy/correction_mass": record["correction_mass"],
    }


def _same(metric: Any, value: float | None) -> bool:
    if metric is None or value is None:
        return metric is value
    return math.isclose(metric, value, rel_tol=1e-9, abs_tol=1e-9)


def read_receipts(path: Path) -> tuple[list[Record], dict[int, Record], list[Record]]:
    """Return the `start` records, and the `step` and `load` records that were not rolled back."""
    starts, steps, loads = list[Record](), dict[int, Record](), list[Record]()
    for record in records_of(path):
        if record["event"] == "start":
            starts.append(record)
            steps = {n: each for n, each in steps.items() if n <= record["steps_done"]}
            loads = [load for load in loads if load["version"] <= record["policy_version"]]
        elif record["event"] == "step":
            steps[record["step"]] = record
        elif record["event"] == "load":
            loads.append(record)
    return starts, steps, loads


def check_one_run(receipts: Path, check: Check) -> None:
    """Check that receipts, configs and checkpoints of a folder have the same ids.

    A run has one id. An incarnation is the random id of a process of the run.
    """
    folder, check_ids = receipts.parent, partial(check, "one_run")
    # Read before the receipts: a run writes the record of a step before the step's checkpoint.
    latest = folder / "checkpoints" / "latest"
    target = os.readlink(latest) if latest.is_symlink() else None
    states = (
        path / "state" / "driver.json" for path in sorted(saved_steps(folder / "checkpoints"))
    )
    saved = {path.parents[1].name: json.loads(path.read_text()) for path in states if path.exists()}
    starts, steps, _ = read_receipts(receipts)
    if starts[0].get("run") is None:  # receipts of a test
        return
    incarnations = {start["attempt"]: start["incarnation"] for start in starts}
    run = starts[0]["run"]
    other = next((start["run"] for start in starts if start["run"] != run), None)
    check_ids(other is None, f"the receipts name two runs: {run} and {other}")
    heads = tuple(f"# run: {run}\n# incarnation: {each}\n" for each in incarnations.values())
    for path in sorted(folder.glob("config*.yaml")):
        text, allowed = path.read_text(), heads[-1:] if path.name == "config.yaml" else heads
        problem = f"{path.name} begins with {text[: len(heads[0])]}, which no start record has"
        check_ids(text.startswith(allowed), problem)
    for name, state in saved.items():
        identity = state["identity"]
        known = identity["run"] == run and identity["incarnation"] in incarnations.values()
        check_ids(known, f"{name} is a checkpoint of {identity}, which no start record names")
        done = state["ledger"]["steps_done"]
        check_ids(name == f"step_{done}", f"{name} is the checkpoint of step {done}")
        step, state_folder = steps.get(done), folder / "checkpoints" / name / "state"
        # A step that a resume trained again may have its earlier checkpoint until the next one.
        if step is None or incarnations[step["attempt"]] != identity["incarnation"]:
            continue
        if (state_folder / "batch.json").is_file():
            same = batch_hash(read_state(state_folder, "batch")) == step["batch_hash"]
            check_ids(same, f"{name} has another batch than step {done} trained")
    if target is None:
        return
    ledger = saved[target]["ledger"] if target in saved else {}
    step = steps.get(ledger.get("steps_done", -1))
    check_ids(step is not None, f"latest is {target}, which is of no step that counts")
    if step is not None:
        stated = ledger["policy_version"], saved[target]["identity"]["incarnation"]
        found = step["policy_version"], incarnations[step["attempt"]]
        check_ids(stated == found, f"latest is {target} with {stated}, but its step has {found}")
