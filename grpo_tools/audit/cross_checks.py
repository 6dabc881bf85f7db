"""Compares the receipts with the run's config and metrics."""

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
from grpo_tools.audit.choices import Record
from grpo_tools.audit.findings import Findings

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


class MetricsCheck:
    """Compares the numbers of each step with `logs/metrics.jsonl`."""

    def __init__(self, folder: Path, findings: Findings) -> None:
        self._check, self._findings = findings.check, findings
        self._found = {
            (record["attempt"], record["step"]): record
            for record in records_of(folder / "logs" / "metrics.jsonl")
            if record.get("step", 0) > 0
        }
        self._seen = set[tuple[int, int]]()

    def step(self, record: Record) -> None:
        """Compare a step record."""
        attempt, step = record["attempt"], record["step"]
        self._seen.add((attempt, step))
        metrics = self._found.get((attempt, step))
        if metrics is None:
            is_last = not any(a == attempt and n > step for a, n in self._found)
            self._check("metrics", is_last, "logs/metrics.jsonl has later steps but not this one")
            return
        for key, value in _measured(record).items():
            if key in metrics:
                same = _same(metrics[key], value)
                self._check("metrics", same, f"{key} is {value}, but {metrics[key]} in the metrics")

    def finish(self) -> None:
        """Check that every step in the metrics is in the receipts."""
        missing = sorted(self._found.keys() - self._seen)
        attempt, step = missing[0] if missing else (0, 0)
        if self._found:
            self._findings.where = "receipts.jsonl"
            problem = f"step {step} of attempt {attempt} is only in logs/metrics.jsonl"
            self._check("metrics", not missing, problem)


def _measured(record: Record) -> dict[str, float | None]:
    """Compute metrics of a step from its record."""
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


def check_one_run(receipts: Path, check: Check) -> None:
    """Check that receipts, configs and checkpoints of a folder have the same ids.

    A run has one id. An incarnation is the random id of a process of the run.
    """
    folder, check_ids = receipts.parent, partial(check, "one_run")
    # Read before the receipts: a run writes the record of a step before the step's checkpoint.
    latest = folder / "checkpoints" / "latest"
    target = os.readlink(latest) if latest.is_symlink() else None
    states = sorted(folder.glob("checkpoints/step_*/state/driver.json"))
    saved = {path.parents[1].name: json.loads(path.read_text()) for path in states}
    runs, incarnations = list[str](), list[str]()
    steps = dict[int, tuple[int, str]]()  # without steps that a later attempt superseded
    for record in records_of(receipts):
        if record["event"] == "start":
            if record.get("run") is None:  # of a test
                return
            runs.append(record["run"])
            incarnations.append(record["incarnation"])
            steps = {step: each for step, each in steps.items() if step <= record["steps_done"]}
        elif record["event"] == "step":
            steps[record["step"]] = (record["policy_version"], incarnations[-1])
    run = runs[0]
    other = next((each for each in runs if each != run), None)
    check_ids(other is None, f"the receipts name two runs: {run} and {other}")
    heads = tuple(f"# run: {run}\n# incarnation: {each}\n" for each in incarnations)
    for path in sorted(folder.glob("config*.yaml")):
        text, allowed = path.read_text(), heads[-1:] if path.name == "config.yaml" else heads
        problem = f"{path.name} begins with {text[: len(heads[0])]}, which no start record has"
        check_ids(text.startswith(allowed), problem)
    for name, state in saved.items():
        identity = state["identity"]
        known = identity["run"] == run and identity["incarnation"] in incarnations
        check_ids(known, f"{name} is a checkpoint of {identity}, which no start record names")
    if target is None:
        return
    ledger = saved[target]["ledger"] if target in saved else {}
    step = steps.get(ledger.get("steps_done", -1))
    if check_ids(step is not None, f"latest is {target}, which is of no step that counts"):
        stated = ledger["policy_version"], saved[target]["identity"]["incarnation"]
        check_ids(stated == step, f"latest is {target} with {stated}, but its step has {step}")
