"""Writes what each test cost: seconds, and seconds of a core in all processes that it started.

A run of tests leaves `build/test_costs.tsv`, the dearest test first. Processes of a whole run are
waited for by nobody here: they are looked at twice a second while they live.

    PYTHONPATH=tests python -m lib.costs    # after `make test`: writes tests/lib/costly.txt from it
"""

import contextlib
import os
import threading
from collections import Counter
from pathlib import Path

import psutil
import pytest

from lib.tiers import COSTLY, tier_of

TABLE = Path(__file__).parents[2] / "build" / "test_costs.tsv"
EVERY_S = 0.5
COSTLY_CORE_S, COSTLY_S = 0.3, 1.0
"""Of all cases of a test together: what costs this much is no test of `make check`."""


class Tree:
    """Core seconds of the processes below this one, also of those that have ended."""

    def __init__(self) -> None:
        self.seen: dict[tuple[int, float], float] = {}
        """(pid, time of its start) -> its own seconds when it was last looked at."""

    def look(self) -> float:
        """Look at all processes below; returns the seconds of all that were ever seen."""
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                self.seen[process.pid, process.create_time()] = times.user + times.system
        return sum(self.seen.values())

    @contextlib.contextmanager
    def watched(self):
        """Look again and again, in a thread."""
        stopped = threading.Event()

        def watch():
            while not stopped.wait(EVERY_S):
                self.look()

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        yield
        stopped.set()
        thread.join()


class Costs:
    """In each worker: measures each test."""

    def __init__(self) -> None:
        self.tree = Tree()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item, nextitem):
        item.core_s = {"began": os.times()}
        if tier_of(item) is None:
            return (yield)
        item.core_s["tree"] = self.tree.look()
        with self.tree.watched():
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if report.when == "teardown":
            began, now = item.core_s["began"], os.times()
            own, waited_for = (sum(now[i : i + 2]) - sum(began[i : i + 2]) for i in (0, 2))
            below = self.tree.look() - item.core_s["tree"] if "tree" in item.core_s else 0.0
            report.user_properties.append(("core_s", round(own + max(waited_for, below), 3)))
            report.user_properties.append(("tier", tier_of(item) or "-"))
        return report


class CostTable:
    """Where reports arrive: adds up the phases of each test, and writes the table."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.core_s: dict[str, float] = {}
        self.tiers: dict[str, str] = {}

    def pytest_runtest_logreport(self, report):
        name = report.nodeid
        self.seconds[name] = self.seconds.get(name, 0.0) + report.duration
        if report.when == "teardown":
            measured = dict(report.user_properties)
            self.core_s[name], self.tiers[name] = measured["core_s"], measured["tier"]

    def pytest_sessionfinish(self):
        if not self.core_s:
            return
        TABLE.parent.mkdir(exist_ok=True)
        dearest = sorted(self.core_s, key=lambda name: -self.core_s[name])
        rows = (
            f"{self.core_s[n]:.3f}\t{self.seconds[n]:.3f}\t{self.tiers[n]}\t{n}\n" for n in dearest
        )
        TABLE.write_text("core_s\tseconds\ttier\ttest\n" + "".join(rows))

    def pytest_terminal_summary(self, terminalreporter):
        if not self.core_s:
            return
        total, wall = sum(self.core_s.values()), sum(self.seconds.values())
        text = f"{total:.0f} core seconds in {wall:.0f} s of tests; build/{TABLE.name} has each"
        terminalreporter.write_line(text)


def pytest_configure(config):
    """Measure in each worker, and collect where there is no worker."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(CostTable())
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.register(Costs())


def write_costly() -> None:
    """Name the tests without a tier that cost much, from the table of the last run."""
    core_s: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    for row in TABLE.read_text().splitlines()[1:]:
        core, wall, tier, case = row.split("\t")
        if tier == "-":
            test = case.partition("[")[0]
            core_s[test] += float(core)
            seconds[test] += float(wall)
    costly = [t for t in core_s if core_s[t] >= COSTLY_CORE_S or seconds[t] >= COSTLY_S]
    COSTLY.write_text("".join(f"{test}\n" for test in sorted(costly)))


if __name__ == "__main__":
    write_costly()
