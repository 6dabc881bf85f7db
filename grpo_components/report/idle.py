"""Measures idle time: the share of each step's time in which a role had nothing to work on."""

from __future__ import annotations

from collections import defaultdict
from statistics import fmean
from typing import Any

from grpo_components.report.curves import Chart, chart, curve, thinned
from grpo_components.report.run_files import Record


class Idle:
    """Measures the idle time of each role between one training step and the next.

    A generator is busy while it has a group in flight. A reference is busy from the end of a
    group's generation until the group is buffered. The trainers are busy from taking a batch until
    the end of its step. The time of an attempt's first step begins with the first issued group.

    Args:
        references: number of reference workers.
    """

    def __init__(self, references: int) -> None:
        self._references = references
        self._since: dict[str, float] = {}
        """Time at which each busy role became busy."""
        self._busy: dict[str, float] = defaultdict(float)
        self._tasks: dict[str, set[Any]] = defaultdict(set)
        self._generators: dict[int, str] = {}
        self._known: set[str] = {"trainers", *(f"reference_{i}" for i in range(references))}
        self._last: float | None = None
        self.steps: list[int] = []
        self.shares: list[dict[str, float]] = []
        """Idle share of each step, by role."""

    def follow(self, event: Record) -> None:
        """Update the busy times with the next event of `events.jsonl`."""
        kind, now = event["event"], event["time"]
        group: int = event.get("group", -1)
        if self._last is None and kind in ("issue", "sample"):
            self._last = now
        if kind == "issue":
            self._generators[group] = event["role"]
            self._known.add(event["role"])
            self._begin(event["role"], group, now)
        elif kind == "finish" and group in self._generators:
            self._end(self._generators.pop(group), group, now)
            if self._references:
                self._begin(f"reference_{group % self._references}", group, now)
        elif kind == "buffer" and self._references:
            self._end(f"reference_{group % self._references}", group, now)
        elif kind == "drop":
            for dropped in event.get("groups", ()):
                for role in list(self._tasks):
                    self._end(role, dropped, now)
        elif kind == "sample":
            self._begin("trainers", "step", now)
        elif kind == "step":
            self._end("trainers", "step", now)
            self._close_step(event["step"], now)
        elif kind == "restart":
            self._forget(event.get("role"), now)
        elif kind in ("rollback", "start"):
            for role in list(self._tasks):
                self._forget(role, now)
            self._busy.clear()
            self._last = None

    def _begin(self, role: str, task: Any, now: float) -> None:
        if not self._tasks[role]:
            self._since[role] = now
        self._tasks[role].add(task)

    def _end(self, role: str, task: Any, now: float) -> None:
        if task in self._tasks[role]:
            self._tasks[role].discard(task)
            if not self._tasks[role]:
                self._busy[role] += now - self._since.pop(role)

    def _forget(self, role: str | None, now: float) -> None:
        if role is not None and self._tasks[role]:
            self._tasks[role].clear()
            self._busy[role] += now - self._since.pop(role)

    def _close_step(self, step: int, now: float) -> None:
        while self.steps and self.steps[-1] >= step:  # steps that this attempt repeats
            self.steps.pop()
            self.shares.pop()
        if self._last is not None and now > self._last:
            for role, since in self._since.items():
                self._busy[role] += now - since
                self._since[role] = now
            seconds = now - self._last
            shares = {
                role: min(1.0, max(0.0, 1 - self._busy[role] / seconds)) for role in self._known
            }
            self.steps.append(step)
            self.shares.append(shares)
        self._busy.clear()
        self._since = dict.fromkeys(self._since, now)
        self._last = now

    def chart(self) -> Chart | None:
        """Return a chart of each role's idle share over steps; None if there are no steps."""
        if not self.steps:
            return None
        traces = []
        for role in sorted(self._known):
            values = [shares.get(role, 1.0) for shares in self.shares]
            steps, means = thinned(self.steps, values, fmean)
            traces.append(curve(role, steps, means, meta={"smooth": True}))
        about = "share of the time between two steps in which a role had no group or batch; "
        about += "evaluations and checkpoints count as idle"
        return chart("Idle time by role", about, traces, yaxis={"range": [-0.02, 1.02]})
