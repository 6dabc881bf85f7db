"""Compares the receipts with the run's other files: config, metrics and events."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from grpo_tools.audit.findings import Findings
from grpo_tools.audit.history import Record
from grpo_tools.audit.settings import Settings, correction_bounds, read_settings
from grpo_tools.json_lines import records_of

_SLACK = 1e-6
"""Relative tolerance: the order of summation changes the rounding of a mean."""


class CrossCheck(Protocol):
    """A check that compares the records with another file of the run."""

    def follow(self, record: Record) -> None:
        """Check the next record; its fields are complete."""
        ...

    def finish(self) -> None:
        """Make the checks that need all records."""


class ConfigCheck:
    """Compares the settings in each start record with the attempt's config.

    The run's last process wrote `config.yaml`; an earlier process whose last attempt was n wrote
    `config_attempt_<n>.yaml`. A rollback begins an attempt in the same process, with its config.
    """

    def __init__(self, folder: Path, last_attempt: int, findings: Findings) -> None:
        self._check, self._findings, self._last = findings.check, findings, last_attempt
        numbers = (_number_of(path) for path in folder.glob("config_attempt_*.yaml"))
        self._until = sorted(number for number in numbers if number is not None)
        self._folder = folder
        self._read: dict[Path, Settings | None] = {}
        self._settings: Settings | None = None

    def follow(self, record: Record) -> None:
        """Compare a start record, or check the correction mass of a step."""
        if record["record"] == "start":
            self._settings = self._settings_of(record["attempt"])
            if self._settings is not None:
                self._compare(record, self._settings)
        elif record["record"] == "step" and self._settings is not None:
            self._check_mass(record["correction_mass"], self._settings)

    def finish(self) -> None:
        """Do nothing: `follow` makes every check."""

    def _settings_of(self, attempt: int) -> Settings | None:
        until = next((number for number in self._until if number >= attempt), None)
        name = "config.yaml" if until is None else f"config_attempt_{until}.yaml"
        path = self._folder / name
        if path not in self._read:
            self._read[path] = None
            try:
                self._read[path] = read_settings(path) if path.exists() else None
            except (OSError, ValueError) as error:
                self._check("config", False, f"{name} cannot be read: {error}")
        settings = self._read[path]
        # A run that resumed in a new folder has a single config here, that of its last attempt.
        resumed = settings is not None and settings.get("resume_from_checkpoint") != "false"
        only_last = until is None and not self._until and resumed
        return None if only_last and attempt < self._last else settings

    def _compare(self, start: Record, settings: Settings) -> None:
        for key in start.keys() & settings.keys():
            setting = settings[key]
            if key == "num_steps" and settings.get("eval_only", "false") != "false":
                setting = "0"
            if isinstance(start[key], dict):
                self._compare_section(key, start[key], setting)
                continue
            holds = setting == str(start[key])
            self._check("config", holds, f"{key} is {start[key]}, but {setting} in the config")

    def _compare_section(self, key: str, recorded: Record, setting: Any) -> None:
        section = setting if isinstance(setting, dict) else {}
        for name, value in recorded.items():
            try:
                holds = float(section[name]) == value
            except (KeyError, ValueError):
                holds = False
            given = section.get(name, "missing")
            problem = f"{key}.{name} is {value}, but {given} in the config"
            self._check("config", holds, problem)

    def _check_mass(self, mass: float | None, settings: Settings) -> None:
        low, high = correction_bounds(settings.get("off_policy"))
        if mass is not None:
            slack = _SLACK * max(1.0, mass)
            holds = low - slack <= mass <= high + slack
            bounds = f"between {low:g} and {high:g}"
            self._check("correction", holds, f"correction_mass is {mass}; off_policy: {bounds}")


class MetricsCheck:
    """Compares the numbers of each step with `logs/metrics.jsonl`."""

    def __init__(self, folder: Path, findings: Findings) -> None:
        self._check, self._findings = findings.check, findings
        found: dict[tuple[int, int], Record] = {}
        for record in records_of(folder / "logs" / "metrics.jsonl"):
            attempt, step = record.get("attempt"), record.get("step")
            if type(attempt) is int and type(step) is int and step > 0:
                found[attempt, step] = record
        self._found, self._seen = found, set[tuple[int, int]]()
        self._last: dict[int, int] = {}
        for attempt, step in found:
            self._last[attempt] = max(step, self._last.get(attempt, 0))

    def follow(self, record: Record) -> None:
        """Compare a step record."""
        if record["record"] != "step":
            return
        attempt, step = record["attempt"], record["step"]
        self._seen.add((attempt, step))
        metrics = self._found.get((attempt, step))
        if metrics is None:
            is_last = step > self._last.get(attempt, 0)
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


class LoadsCheck:
    """Compares each pull (weight load that a generator acknowledged) with `logs/events.jsonl`."""

    def __init__(self, folder: Path, findings: Findings) -> None:
        self._check, self._findings = findings.check, findings
        self._path = folder / "logs" / "events.jsonl"
        self._pulls: list[tuple[str, tuple[int, str, int], str]] = []

    def follow(self, record: Record) -> None:
        """Collect the acknowledged pulls of a record."""
        for pull in record.get("acknowledged", ()):
            identity = (record["attempt"], pull["generator"], pull["version"])
            self._pulls.append((self._findings.where, identity, pull["checksum"]))

    def finish(self) -> None:
        """Compare the pulls with the log, which is read last so that it has all of them."""
        loads: dict[tuple[Any, Any, Any], list[Any]] = {}
        for event in records_of(self._path, b'"load"'):
            identity = (event.get("attempt"), event.get("role"), event.get("version"))
            if event.get("event") == "load" and all(type(v) in (int, str) for v in identity):
                loads.setdefault(identity, []).append(event.get("checksum"))
        logged = {attempt for attempt, _, _ in loads}
        for where, identity, checksum in self._pulls:
            attempt, name, version = identity
            if attempt not in logged:  # the attempt's log is in another folder
                continue
            self._findings.where = where
            found = loads.get(identity, [])
            problem = f"{name} loads version {version}, which logs/events.jsonl lacks"
            self._check("loads", bool(found), problem)
            problem = f"{name} loads version {version} with {checksum}, but with "
            problem += f"{found[:1]} in logs/events.jsonl"
            self._check("loads", not found or checksum in found, problem)


def cross_checks(folder: Path, attempts: Iterable[int], findings: Findings) -> list[CrossCheck]:
    """Return the checks that compare the receipts with the run's other files."""
    last = max(attempts, default=0)
    return [
        ConfigCheck(folder, last, findings),
        MetricsCheck(folder, findings),
        LoadsCheck(folder, findings),
    ]


def _measured(record: Record) -> dict[str, float | None]:
    """Compute metrics of a step from its record."""
    counts = {int(version): n for version, n in record["token_versions"].items()}
    tokens, start = sum(counts.values()), record["trained_from"]
    versions = sum(version * n for version, n in counts.items())
    return {
        "policy_version": record["policy_version"],
        "rollout/trained_tokens": tokens,
        "staleness/max": record["max_staleness"] or 0,
        "staleness/mean": start - versions / tokens if tokens else None,
        "off_policy/correction_mass": record["correction_mass"],
    }


def _same(metric: Any, value: float | None) -> bool:
    if isinstance(metric, bool) or not isinstance(metric, int | float) or value is None:
        return metric is None and value is None
    return math.isclose(metric, value, rel_tol=1e-9, abs_tol=1e-9)


def _number_of(path: Path) -> int | None:
    number = path.stem.removeprefix("config_attempt_")
    return int(number) if number.isascii() and number.isdecimal() and len(number) < 10 else None
