"""The results of the staleness atlas by place: what the runs of a place have in common."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from staleness_lines import Line

_T = 12.706, 4.303, 3.182, 2.776, 2.571
"""97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom."""
KEPT, LEARNS = 0.75, 0.1
"""Part of the gain without staleness that counts as kept, and gain that counts as learning."""


@dataclass(frozen=True)
class Spot:
    """The runs of one objective, bound and learning rate."""

    lines: tuple[Line, ...]

    @property
    def success(self) -> list[float]:
        """Held-out success at the end of each run; 0 if it ended early."""
        return [line.after or 0.0 for line in self.lines]

    @property
    def mean(self) -> float:
        """Mean success."""
        return statistics.fmean(self.success)

    @property
    def gain(self) -> float:
        """Mean success less that of the base model."""
        return statistics.fmean(
            after - _base(line) for after, line in zip(self.success, self.lines, strict=True)
        )

    @property
    def broken(self) -> int:
        """Number of runs that ended early, or no better than the base model."""
        return sum(
            bool(line.ended) or after <= _base(line)
            for after, line in zip(self.success, self.lines, strict=True)
        )

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % interval of the mean, by Student's t over the runs, within 0 to 1.

        None with one run.
        """
        free = len(self.lines) - 1
        if not free:
            return None
        half = _T[free - 1] * statistics.stdev(self.success) / (free + 1) ** 0.5
        return max(0.0, self.mean - half), min(1.0, self.mean + half)

    def keeps(self, synchronous: Spot) -> bool:
        """Whether it keeps the gain that there is without staleness."""
        return synchronous.learns and self.gain >= KEPT * synchronous.gain

    @property
    def learns(self) -> bool:
        """Whether the policy gains anything to speak of."""
        return self.gain >= LEARNS


def _base(line: Line) -> float:
    return line.before or 0.0


class Atlas:
    """All results, by objective, bound and learning rate."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self.lines = lines

    def spot(self, objective: str, bound: int, rate: str) -> Spot | None:
        """Return what was run; None if nothing was."""
        at = (objective, bound, rate)
        found = [
            line for line in self.lines if (line.objective, line.max_staleness, line.rate) == at
        ]
        return Spot(tuple(found)) if found else None
