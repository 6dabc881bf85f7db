"""Computes from a run's files what the diagnosis rules compare: averages, trends, use of time."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections import Counter
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from grpo_components.files import Record, records_of
from grpo_components.time_use import STARTING
from grpo_tools.report.curves import values_of
from grpo_tools.report.run_files import DAMAGED, History, read_config, read_history
from grpo_tools.report.timeline import seconds_by_role

_FEWEST, FEWEST_OF_TREND = 5, 15
"""Minimum number of values for `late` and `share_of_step`, and for `trend`."""


class Trend(NamedTuple):
    """Means of a metric over the first and the last third of the steps; NaN with few steps."""

    before: float = math.nan
    after: float = math.nan
    sigmas: float = 0.0
    """Difference of the means in standard errors; above 0 if the values rise."""

    def __str__(self) -> str:
        return f"{self.before:.2g} to {self.after:.2g}"


class Run:
    """A run that has ended, is running or was killed; its files may be damaged.

    A metric that was not measured is NaN, so every comparison with it is false.
    """

    def __init__(self, history: History) -> None:
        self.folder, self.history, metrics = history.folder, history, history.metrics
        self.steps = [each for each in metrics if each["step"] > 0]
        self.evaluations = [each for each in metrics if values_of([each], "eval/success_rate")]
        start = history.starts[-1] if history.starts else {}
        attempt = start.get("attempt", 0)
        self.error = history.failures.get(attempt) or ""
        """Error that ended the last attempt; empty if none did."""
        done = self.steps[-1]["step"] if self.steps else 0
        over = attempt in {*history.ends, *history.failures}
        self.steps_left = 0 if over else max(0, start.get("num_steps", 0) - done)
        self.failed_samples, self.failed_in_evaluations = Counter[str](), 0
        self.failed_groups = set[int]()
        for record in records_of(self.folder / "logs" / "failed_samples.jsonl", b'"errors"'):
            with contextlib.suppress(*DAMAGED):
                self.failed_samples.update(record["errors"])
                evaluated = sum(record["errors"].values()) if "evaluation" in record else 0
                self.failed_in_evaluations += evaluated
                self.failed_groups.add(record.get("group_id", -1))
        warned = records_of(self.folder / "logs" / "warnings.jsonl", b'"kind"')
        self.warnings = {str(each.get("kind")): str(each.get("warning")) for each in warned}
        self._config: Record = {}
        with contextlib.suppress(OSError, ValueError):
            config = read_config(self.folder)
            self._config = config if isinstance(config, dict) else {}

    def setting(self, key: str, default: Any = None) -> Any:
        """Return the value of a dotted key of the config; `default` if it is missing or null."""
        node: Any = self._config
        for part in key.split("."):
            node = node.get(part) if isinstance(node, dict) else None
        return default if node is None else node

    def has(self, advice: str) -> bool:
        """Return whether the config has `advice`: `key=value`, or a `key` with any true value."""
        key, _, value = advice.partition("=")
        found = self.setting(key)
        return found == yaml.safe_load(value) if value else bool(found)

    def values(self, key: str) -> list[float]:
        """Return a metric's values, step by step."""
        return values_of(self.steps, key)

    def late(self, key: str, of: Callable[[list[float]], float] = statistics.median) -> float:
        """Average a metric over the last third of its values; `of` computes the average."""
        values = self.values(key)
        return math.nan if len(values) < _FEWEST else of(values[-(len(values) // 3) :])

    def trend(self, key: str, since: float = 0.0) -> Trend:
        """Compare a metric's first and last third; `since`: share of early steps to leave out."""
        values = self.values(key)
        values = values[int(since * len(values)) :]
        if len(values) < FEWEST_OF_TREND:
            return Trend()
        third = len(values) // 3
        first, last = values[:third], values[-third:]
        before, after = statistics.fmean(first), statistics.fmean(last)
        noise = math.sqrt((statistics.variance(first) + statistics.variance(last)) / third)
        return Trend(before, after, (after - before) / max(noise, 1e-12))

    def share_of_step(self, key: str) -> float:
        """Return which share of `time/step` the metric `key` took, after the first two steps."""
        steps = self.steps[2:] if len(self.steps) >= _FEWEST else []
        whole = sum(values_of(steps, "time/step"))
        return sum(values_of(steps, key)) / whole if whole else math.nan

    def share_of_time(self, roles: str, *activities: str) -> float:
        """Return activities' share of the time without start-up; `roles`: prefix of role names."""
        times = [each for role, each in self._seconds.items() if role.startswith(roles)]
        whole = sum(sum(each.values()) - each.get(STARTING, 0.0) for each in times)
        spent = sum(each.get(activity, 0.0) for each in times for activity in activities)
        return spent / whole if whole else math.nan

    @cached_property
    def heartbeats(self) -> list[Record]:
        """Heartbeats (periodic reports of memory and use of time) of all roles."""
        return [*records_of(self.folder / "logs" / "heartbeats.jsonl", b'"role"')]

    @cached_property
    def _seconds(self) -> dict[str, dict[str, float]]:
        return seconds_by_role(self.heartbeats)


def read(folder: Path) -> Run:
    """Read the files of a run; raise a FileNotFoundError if the folder has none."""
    history = read_history(folder)
    if not history.metrics and not history.starts:
        path = folder / "logs" / "metrics.jsonl"
        raise FileNotFoundError(f"no run: neither {path} nor receipts.jsonl has a record of one")
    return Run(history)
