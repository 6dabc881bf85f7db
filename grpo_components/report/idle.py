"""Who stood idle: how much of each step's time a role had nothing to work on."""

from __future__ import annotations

from collections import defaultdict
from statistics import fmean
from typing import Any

from grpo_components.report.curves import Chart, chart, curve, thinned
from grpo_components.report.run_files import Record


class Idle:
    """How long each role had nothing to do, from one training step to the next.

    An attempt's first step counts from the first group that a generator gets.

    A generator works while it has a group in flight, a reference from the end of a group's
    generation until it is buffered, the trainers from the taking of a batch to the end of its step.
    """

    def __init__(self, references: int) -> None:
        self._references = references
        self._since: dict[str, float] = {}
        """When each working role began."""
        self._busy: dict[str, float] = defaultdict(float)
        self._tasks: dict[str, set[Any]] = defaultdict(set)
        self._generators: dict[int, str] = {}
        self._known: set[str] = {"trainers", *(f"reference_{i}" for i in range(references))}
        self._last: float | None = None
        self.steps: list[int] = []
        self.shares: list[dict[str, float]] = []
        """Of each step, the idle share of its time by role."""

    def follow(self, event: Record) -> None:
        """Take the next event of the log."""
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
        while self.steps and self.steps[-1] >= step:  # an earlier attempt's, done again
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
        """Idle shares over steps; None if there was no step."""
        if not self.steps:
            return None
        traces = []
        for role in sorted(self._known):
            values = [shares.get(role, 1.0) for shares in self.shares]
            steps, means = thinned(self.steps, values, fmean)
            traces.append(curve(role, steps, means, meta="smooth"))
        about = "share of the time between two steps in which a role had no group or batch to work "
        about += "on; evaluations and checkpoints count as idle"
        return chart("Idle time by role", about, traces, yaxis={"range": [-0.02, 1.02]})
