"""Rules that compare the receipts with what else a run has written down."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from grpo_components.audit.findings import Report
from grpo_components.audit.history import Record
from grpo_components.audit.lines import records_of
from grpo_components.audit.settings import Settings, correction_bounds, read_settings

_SLACK = 1e-6
"""Relative, of means of weights in another order."""


class Beside(Protocol):
    """A rule that compares records with another file."""

    def follow(self, record: Record) -> None:
        """Take the next record, of the right shape."""
        ...

    def finish(self) -> None:
        """Check what can only be said at the end of the file."""


class Config:
    """Every setting that a start record repeats is that of the attempt's config.

    `config.yaml` is that of the last life of the run, `config_attempt_<n>.yaml` of the one that
    ended with attempt n. A run that goes on elsewhere, and rollbacks, share one.

    Args:
        folder: of the run.
        last_attempt: of the receipts.
        report: told what is checked.
    """

    def __init__(self, folder: Path, last_attempt: int, report: Report) -> None:
        self._check, self._report, self._last = report.check, report, last_attempt
        numbers = (_number_of(path) for path in folder.glob("config_attempt_*.yaml"))
        self._until = sorted(number for number in numbers if number is not None)
        self._folder = folder
        self._read: dict[Path, Settings | None] = {}
        self._settings: Settings | None = None

    def follow(self, record: Record) -> None:
        """Compare a start record; the correction mass of a step with what the config allows."""
        if record["record"] == "start":
            self._settings = self._settings_of(record["attempt"])
            if self._settings is not None:
                self._compare(record, self._settings)
        elif record["record"] == "step" and self._settings is not None:
            self._check_mass(record["correction_mass"], self._settings)

    def finish(self) -> None:
        """Nothing is left to be compared."""

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
        # One that began elsewhere, in another version of this package, says nothing of what it
        # goes on from.
        resumed = settings is not None and settings.get("resume_from_checkpoint") != "false"
        alone = until is None and not self._until and resumed
        return None if alone and attempt < self._last else settings

    def _compare(self, start: Record, settings: Settings) -> None:
        for key in start.keys() & settings.keys():
            said = settings[key]
            if key == "num_steps" and settings.get("eval_only", "false") != "false":
                said = "0"
            holds = said == str(start[key])
            self._check("config", holds, f"{key} is {start[key]}, in the config {said}")

    def _check_mass(self, mass: float | None, settings: Settings) -> None:
        low, high = correction_bounds(settings.get("off_policy"))
        if mass is not None:
            slack = _SLACK * max(1.0, mass)
            holds = low - slack <= mass <= high + slack
            bounds = f"between {low:g} and {high:g}"
            self._check("correction", holds, f"correction_mass is {mass}; off_policy: {bounds}")


class Metrics:
    """Every step has the numbers that `logs/metrics.jsonl` has of it.

    Args:
        folder: of the run.
        report: told what is checked.
    """

    def __init__(self, folder: Path, report: Report) -> None:
        self._check, self._report = report.check, report
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
            there = step > self._last.get(attempt, 0)
            self._check("metrics", there, "logs/metrics.jsonl has later steps, and not this one")
            return
        for key, value in _measured(record).items():
            if key in metrics:
                same = _same(metrics[key], value)
                self._check("metrics", same, f"{key} is {value}, in the metrics {metrics[key]}")

    def finish(self) -> None:
        """Find steps that the receipts lack."""
        lacking = sorted(self._found.keys() - self._seen)
        attempt, step = lacking[0] if lacking else (0, 0)
        if self._found:
            self._report.where = "receipts.jsonl"
            said = f"step {step} of attempt {attempt} is in logs/metrics.jsonl alone"
            self._check("metrics", not lacking, said)


class Loads:
    """Every acknowledged pull is in `logs/events.jsonl`, with the checksum of what was loaded.

    Args:
        folder: of the run.
        report: told what is checked.
    """

    def __init__(self, folder: Path, report: Report) -> None:
        self._check, self._report = report.check, report
        self._path = folder / "logs" / "events.jsonl"
        self._pulls: list[tuple[str, tuple[int, str, int], str]] = []

    def follow(self, record: Record) -> None:
        """Remember the pulls of a record, and where it stands."""
        for pull in record.get("acknowledged", ()):
            identity = (record["attempt"], pull["generator"], pull["version"])
            self._pulls.append((self._report.where, identity, pull["checksum"]))

    def finish(self) -> None:
        """Compare: the log of a run that still writes knows of no pull later than its receipts."""
        loads: dict[tuple[Any, Any, Any], list[Any]] = {}
        for event in records_of(self._path, b'"load"'):
            identity = (event.get("attempt"), event.get("role"), event.get("version"))
            if event.get("event") == "load" and all(type(v) in (int, str) for v in identity):
                loads.setdefault(identity, []).append(event.get("checksum"))
        logged = {attempt for attempt, _, _ in loads}
        for where, identity, checksum in self._pulls:
            attempt, name, version = identity
            if attempt not in logged:  # its log lies elsewhere
                continue
            self._report.where = where
            found = loads.get(identity, [])
            there = "logs/events.jsonl has no such load"
            self._check("loads", bool(found), f"{name} loads version {version}; {there}")
            known = [each for each in found if each is not None]  # older versions left it out
            said = f"{name} loads version {version} with {checksum}, by logs/events.jsonl with "
            self._check("loads", not known or checksum in known, f"{said}{known[:1]}")


def rules_beside(folder: Path, attempts: Iterable[int], report: Report) -> list[Beside]:
    """The rules that compare the receipts with other files of a run's folder.

    Args:
        folder: of the run; none of its files has to be there.
        attempts: of the receipts.
        report: told what is checked.
    """
    last = max(attempts, default=0)
    return [Config(folder, last, report), Metrics(folder, report), Loads(folder, report)]


def _measured(record: Record) -> dict[str, float | None]:
    """What the metrics of a step say under these keys, made again from its record."""
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
