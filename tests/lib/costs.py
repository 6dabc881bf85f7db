"""Writes what each test cost: seconds, and seconds of a core in all processes that it started.

A run of all tests leaves `build/test_costs.tsv`, the dearest test first. Core seconds are those of
the tree of processes below the test's worker, so that servers which outlive a test count where they
worked. Processes that leave the tree are not counted.
"""

import contextlib
import os
from pathlib import Path

import psutil
import pytest

TABLE = Path(__file__).parents[2] / "build" / "test_costs.tsv"
LOOK_AFTER_S = 0.2
"""Looking at the tree takes some milliseconds: it is done after tests that take this long."""


def tree_seconds() -> float:
    """Core seconds of this process, of those below it, and of those that they have waited for."""
    total = 0.0
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


class Costs:
    """In each worker: measures each test from the end of the one before it."""

    def __init__(self) -> None:
        self.tree = 0.0
        """At the last look at the whole tree."""
        self.own = self.own_at_look = 0.0
        """Of this process and of those that it has waited for: cheap to read."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item, nextitem):
        item.cost_s = 0.0
        if not self.tree:
            self.tree, self.own = tree_seconds(), sum(os.times()[:4])
            self.own_at_look = self.own
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        item.cost_s += call.duration
        if report.when == "teardown":
            report.user_properties.append(("core_s", round(self._core_seconds(item.cost_s), 3)))
        return report

    def _core_seconds(self, seconds: float) -> float:
        before, self.own = self.own, sum(os.times()[:4])
        if seconds < LOOK_AFTER_S:
            return self.own - before
        tree, told = tree_seconds(), before - self.own_at_look
        spent, self.tree, self.own_at_look = tree - self.tree - told, tree, self.own
        return max(0.0, spent)


class CostTable:
    """Where reports arrive: adds up the phases of each test, and writes the table."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.core_s: dict[str, float] = {}

    def pytest_runtest_logreport(self, report):
        name = report.nodeid
        self.seconds[name] = self.seconds.get(name, 0.0) + report.duration
        for key, value in report.user_properties:
            if key == "core_s" and report.when == "teardown":
                self.core_s[name] = value

    def pytest_sessionfinish(self):
        if len(self.core_s) < 2:
            return
        TABLE.parent.mkdir(exist_ok=True)
        dearest = sorted(self.core_s, key=lambda name: -self.core_s[name])
        rows = [f"{self.core_s[n]:.2f}\t{self.seconds[n]:.2f}\t{n}\n" for n in dearest]
        TABLE.write_text("core_s\tseconds\ttest\n" + "".join(rows))

    def pytest_terminal_summary(self, terminalreporter):
        total, wall = sum(self.core_s.values()), sum(self.seconds.values())
        if self.core_s:
            text = f"{total:.0f} core seconds in {wall:.0f} s of tests; build/{TABLE.name} has each"
            terminalreporter.write_line(text)


def pytest_configure(config):
    """Measure in each worker, and collect where there is no worker."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(CostTable())
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.register(Costs())
