"""What was predicted before the staleness atlas was run, and what the figures say of it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

from staleness_lines import OBJECTIVES, STALENESS
from staleness_map import Atlas

_Claims = Iterator[tuple[str, bool]]


def _keeps_at_the_lowest_rate(atlas: Atlas) -> _Claims:
    for objective in OBJECTIVES:
        synchronous = atlas.spot(objective, 0, "2e-4")
        for bound in STALENESS[1:]:
            spot = atlas.spot(objective, bound, "2e-4")
            if synchronous and spot:
                yield f"{objective} at {bound}", spot.keeps(synchronous)


def _breaks_at_the_highest_rate(atlas: Atlas) -> _Claims:
    for objective in OBJECTIVES:
        synchronous, spot = atlas.spot(objective, 0, "8e-4"), atlas.spot(objective, 8, "8e-4")
        if synchronous and spot:
            yield objective, not spot.keeps(synchronous)


def _clip_holds(atlas: Atlas) -> _Claims:
    for rate in ("4e-4", "8e-4"):
        clipped = atlas.spot("GRPO", 8, rate)
        for objective in ("truncated IS", "REINFORCE"):
            other = atlas.spot(objective, 8, rate)
            if clipped and other:
                claim = f"{clipped.mean:.2f} against {other.mean:.2f} of {objective} at {rate}"
                yield claim, clipped.mean > other.mean


def _decoupled_between(atlas: Atlas) -> _Claims:
    spots = [atlas.spot(name, 8, "8e-4") for name in ("REINFORCE", "decoupled PPO", "GRPO")]
    if all(spots):
        low, mid, high = (spot.mean for spot in spots if spot)
        yield f"REINFORCE {low:.2f}, decoupled PPO {mid:.2f}, GRPO {high:.2f}", low <= mid <= high


def _one_version_is_free(atlas: Atlas) -> _Claims:
    for rate in ("2e-4", "4e-4"):
        pairs = [(atlas.spot(name, 0, rate), atlas.spot(name, 1, rate)) for name in OBJECTIVES]
        both = [(synchronous.mean, one.mean) for synchronous, one in pairs if synchronous and one]
        if both:
            before, after = (statistics.fmean(values) for values in zip(*both, strict=True))
            yield f"{before:.2f} at 0 and {after:.2f} at 1, at {rate}", abs(after - before) <= 0.05


PREDICTIONS: tuple[tuple[str, Callable[[Atlas], _Claims]], ...] = (
    (
        "At a learning rate of 2e-4 each objective keeps, at each bound up to 8, at least three "
        "quarters of what it gains without staleness.",
        _keeps_at_the_lowest_rate,
    ),
    (
        "At 8e-4 none keeps three quarters of its gain at a bound of 8.",
        _breaks_at_the_highest_rate,
    ),
    (
        "At a bound of 8 GRPO, whose clip takes the gradient from tokens that have moved, ends "
        "above truncated IS and REINFORCE, which keep it, at 4e-4 and at 8e-4.",
        _clip_holds,
    ),
    (
        "At 8e-4 and a bound of 8 decoupled PPO ends between GRPO and REINFORCE.",
        _decoupled_between,
    ),
    (
        "A bound of 1 costs nothing that shows: at 2e-4 and 4e-4 the mean over the objectives is "
        "within 0.05 of that without staleness.",
        _one_version_is_free,
    ),
)
"""What was written before the first run of the map, each with what the figures say of it."""


def verdicts(atlas: Atlas) -> list[tuple[str, str]]:
    """Return each prediction with its verdict."""
    return [(prediction, _verdict(list(claims(atlas)))) for prediction, claims in PREDICTIONS]


def _verdict(claims: list[tuple[str, bool]]) -> str:
    wrong = [claim for claim, true in claims if not true]
    if not claims:
        return "not run yet"
    if wrong:
        return f"**wrong** in {len(wrong)} of {len(claims)}: {'; '.join(wrong)}"
    return f"right in {len(claims)} of {len(claims)}"
