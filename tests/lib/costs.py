"""Writes how long each test took into `build/test_costs.tsv`, the longest first.

PYTHONPATH=tests python -m lib.costs    # after `make test`: writes tests/lib/costly.txt from it
"""

from collections import Counter
from pathlib import Path

import pytest

from lib.tiers import COSTLY, tier_of

TABLE = Path(__file__).parents[2] / "build" / "test_costs.tsv"
COSTLY_S = 0.5
"""Seconds of all cases of a test together, from which on `make check` leaves the test out."""
_seconds: Counter[str] = Counter()
_tiers: dict[str, str] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    report.user_properties.append(("tier", tier_of(item) or "-"))
    return report


def pytest_runtest_logreport(report):
    """Add up the phases of each test, in the process to which all workers send their reports."""
    _seconds[report.nodeid] += report.duration
    _tiers[report.nodeid] = dict(report.user_properties).get("tier", "-")


def pytest_sessionfinish(session):
    if _seconds and not hasattr(session.config, "workerinput"):
        TABLE.parent.mkdir(exist_ok=True)
        rows = (f"{s:.3f}\t{_tiers[name]}\t{name}\n" for name, s in _seconds.most_common())
        TABLE.write_text("seconds\ttier\ttest\n" + "".join(rows))


def write_costly() -> None:
    """Write the slow tests of the last run into costly.txt, except those that have a tier."""
    seconds: Counter[str] = Counter()
    for row in TABLE.read_text().splitlines()[1:]:
        wall, tier, case = row.split("\t")
        if tier == "-":
            seconds[case.partition("[")[0]] += float(wall)
    costly = sorted(test for test, total in seconds.items() if total >= COSTLY_S)
    COSTLY.write_text("".join(f"{test}\n" for test in costly))


if __name__ == "__main__":
    write_costly()
