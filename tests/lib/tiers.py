"""Marks each test with its tier: the costliest thing that its fixtures need, such as a whole run.

A test without a tier is marked as `costly` if `costly.txt` names it: see `lib.costs`.
"""

from pathlib import Path

import pytest

TIERS = {
    "e2e": ("tune", "shared_runs", "bench", "interpreter", "wheel_install"),
    "ray": ("cluster",),
    "ranks": ("ranks",),
    "engine": ("build_engine",),
}
"""Marker -> fixtures, the dearest first."""
COSTLY = Path(__file__).with_name("costly.txt")
NIGHTLY = "nightly"  # the folder, and the marker of what is in it
LONG = {"e2e", NIGHTLY}
LONG_S = 1800  # a busy machine may take long
"""Time-out of each test in these folders that has none of its own."""


def tier_of(item) -> str | None:
    """Return the tier of a test; None if it needs nothing that has a tier."""
    names = set(getattr(item, "fixturenames", ()))
    return next((tier for tier, needs in TIERS.items() if names & set(needs)), None)


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items):
    """Mark the tests, and begin with those that take longest: they are the ones of whole runs."""
    ranks = {tier: number for number, tier in enumerate((*TIERS, None))}
    costly = set(COSTLY.read_text().split())
    for item in items:
        tier = tier_of(item) or ("costly" if item.nodeid.partition("[")[0] in costly else None)
        if tier:
            item.add_marker(tier)
        if NIGHTLY in item.path.parts:
            item.add_marker(NIGHTLY)
        if LONG & {*item.path.parts} and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LONG_S))
    items.sort(key=lambda item: ranks[tier_of(item)])
