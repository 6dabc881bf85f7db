"""Recomputes which groups are trained again, by docs/data.md, without using the run's code."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from grpo_components.files import Record


class Trained(NamedTuple):
    """A trained group, as the event `sample` of its step describes it (field `worths`)."""

    spread: float
    oldest_version: int
    uses: int = 1
    """Number of steps that trained it."""


Pool = Mapping[int, Trained]
"""Trained groups, by group number."""


def most_reused(start: Record) -> int:
    """Return how many groups a step may reuse; 0 if the rule allows no reuse, or is impossible."""
    share, uses = start["replay_generation"]["share"], start["replay_generation"]["max_uses"]
    if share >= 1 or uses < 2 or start["max_staleness"] < 1:
        return 0
    return int(share * start["groups_per_step"] + 1e-9)  # 0.29 * 100 is just below 29


def reusable(pool: Pool, start: Record, version: int) -> Pool:
    """Return the groups that may be trained again: not too old at `version`, and not used up."""
    uses, oldest = start["replay_generation"]["max_uses"], version - start["max_staleness"]
    kept = {n: each for n, each in pool.items() if each.oldest_version >= oldest}
    return {n: each for n, each in kept.items() if each.uses < uses}


def chosen(pool: Pool, start: Record, version: int) -> list[int]:
    """Return the numbers of the groups that the step from policy `version` must train again."""

    def priority(number: int) -> float:
        each = pool[number]
        return math.ldexp(each.spread, each.oldest_version - version)  # 1 / 2^age, for any age

    # Sorting keeps the order of equal ones: the older group comes first.
    best = sorted(sorted(pool), key=priority, reverse=True)
    return sorted(best[: most_reused(start)])


def after_step(pool: Pool, again: Pool, new: Pool, skipped: bool) -> Pool:
    """Return the pool after a step that trained the groups `again` and the groups `new`."""
    left = {n: each for n, each in pool.items() if n not in again}
    if skipped:
        return left
    used = {n: each._replace(uses=each.uses + 1) for n, each in again.items()}
    return left | used | {n: each for n, each in new.items() if each.spread > 0}
