"""Compares the groups that were lost with those that were trained: their lengths and rewards."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from grpo_components.trajectory import GroupSummary

_WINDOW = 512
"""Ended groups that are compared, the last ones: older ones come from another policy."""
_FEWEST, _CHANCE = 8, 1e-4
"""Groups of each kind from which on they are compared, and the chance of a false warning by one."""
_ROUNDING = 1e-12
"""Smallest chance that is told from 0."""
_ON_PURPOSE = "filtered"
"""Reason of drops that choose by difficulty on purpose; such groups are on neither side."""


class Comparison(NamedTuple):
    """How the lost groups differ from the trained ones in one respect."""

    lost: int
    trained: int
    lost_mean: float
    trained_mean: float
    distance: float
    """Kolmogorov-Smirnov distance of trained to lost groups."""
    chance: float
    """Probability of a distance as large or larger, if the loss does not depend on the values."""

    @property
    def of_admitted(self) -> float:
        """Kolmogorov-Smirnov distance of the trained groups to all, trained and lost."""
        return self.distance * self.lost / (self.lost + self.trained)

    @property
    def figures(self) -> str:
        """Both distances and the chance in words."""
        small = self.chance < _ROUNDING
        return (
            f"Kolmogorov-Smirnov {self.distance:.2f}, trained against all {self.of_admitted:.2f}, "
            f"chance {f'below {_ROUNDING:g}' if small else f'{self.chance:.1g}'}"
        )


class _Ended(NamedTuple):
    is_lost: bool
    reason: str
    length: float
    reward: float  # NaN if no sample was scored


class LossBias:
    """Follows the groups of a run until they are trained or lost, and compares the two.

    Lost are generated groups that were dropped for any reason but `filtered`. A loss that does not
    depend on length or mean reward leaves both distributions equal. Trained groups are part of all
    groups, so the test is between trained and lost ones: the two are equal exactly if the trained
    ones are distributed as all are.
    """

    def __init__(self) -> None:
        self._living: dict[int, tuple[float, float]] = {}
        """Group that is generated, but neither trained nor dropped -> mean tokens and reward."""
        self._ended: deque[_Ended] = deque(maxlen=_WINDOW)
        self._attempt, self._lost, self._compare_at, self._log_at = 0, 0, _FEWEST, _FEWEST
        self._logged: dict[str, float] = {}

    def count_group(self, group: GroupSummary) -> None:
        """Note the mean reward of a generated group."""
        scored = [reward for reward in group.rewards if math.isfinite(reward)]
        if scored and group.group_id in self._living:
            length, _ = self._living[group.group_id]
            self._living[group.group_id] = length, sum(scored) / len(scored)

    def follow(self, event: Mapping[str, Any]) -> bool:
        """Follow an event of the ledger; return whether it is time to compare again."""
        if (attempt := event.get("attempt", 0)) != self._attempt:
            self._attempt = attempt
            self._living.clear()  # what was in flight is generated again
        if event["event"] == "finish":
            tokens = event["response_tokens"]
            self._living[event["group"]] = sum(tokens) / max(len(tokens), 1), math.nan
        elif event["event"] in ("sample", "drop"):
            reason = event.get("reason", "")
            for group in event["groups"]:
                known = self._living.pop(group, None)
                if known is not None and reason != _ON_PURPOSE:
                    self._ended.append(_Ended(event["event"] == "drop", reason, *known))
                    self._lost += event["event"] == "drop"
        is_time = self._lost >= self._compare_at
        if is_time:
            self._compare_at = 2 * self._lost
        return is_time

    def compare(self) -> dict[str, Comparison]:
        """Compare the last groups: `length` (tokens per response) and `reward` (of the group).

        What has too few groups of one kind is left out.
        """
        found: dict[str, Comparison] = {}
        for name in ("length", "reward"):
            values = [(each.is_lost, getattr(each, name)) for each in self._ended]
            lost, trained = (
                [value for lost, value in values if lost is kind and not math.isnan(value)]
                for kind in (True, False)
            )
            if min(len(lost), len(trained)) >= _FEWEST:
                means = float(np.mean(lost)), float(np.mean(trained))
                differs = kolmogorov_smirnov(lost, trained)
                found[name] = Comparison(len(lost), len(trained), *means, *differs)
        return found

    def metrics(self) -> dict[str, float]:
        """Return the last comparison as metrics; it is made again after 8 more lost groups."""
        if self._lost >= self._log_at:
            self._log_at = self._lost + _FEWEST
            self._logged = {
                f"bias/{name}_{what}": value
                for name, each in self.compare().items()
                for what, value in (("distance", each.of_admitted), ("chance", each.chance))
            }
        return self._logged

    def warnings(self) -> dict[str, str]:
        """Return what is significant, as a sentence for each respect."""
        words = {"length": ("shorter", "longer", "tokens per response")}
        words["reward"] = ("harder", "easier", "as mean reward")
        advice = "logs/failed_samples.jsonl says why samples failed"
        if any(each.reason == "stale" for each in self._ended):
            advice = "stale_groups: wait, stale_tokens: mask or a larger max_staleness keeps them"
        return {
            name: f"dropped groups are {words[name][each.lost_mean > each.trained_mean]}: the "
            f"{each.lost} lost ({self._reasons()}) have {each.lost_mean:.3g} {words[name][2]}, the "
            f"{each.trained} trained ones {each.trained_mean:.3g} ({each.figures}): what is "
            f"trained is biased; {advice}"
            for name, each in self.compare().items()
            if each.chance <= _CHANCE
        }

    def summary(self) -> str:
        """Return the comparison in words for the end of the run, a line for each respect."""
        if not self._lost:
            return "nothing was lost"
        units = {"length": "tokens per response", "reward": "mean reward of a group"}
        lines = [
            f"{units[name]}: {each.trained_mean:.3g} trained, {each.lost_mean:.3g} lost "
            f"({each.figures})"
            for name, each in self.compare().items()
        ]
        few = f"{self._lost} lost ({self._reasons()}), too few to compare"
        return "\n".join(lines) or few

    def _reasons(self) -> str:
        reasons = Counter(each.reason for each in self._ended if each.is_lost)
        return ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())


def kolmogorov_smirnov(left: Sequence[float], right: Sequence[float]) -> tuple[float, float]:
    """Return the two-sample Kolmogorov-Smirnov distance, and its chance.

    The chance is that of an equal or larger distance if the pooled values are divided at random
    into two samples of these sizes: exact, also where values are equal, as means of few numbers
    often are. Schroeer and Trenkler 1995, "Exact and randomization distributions of
    Kolmogorov-Smirnov tests two or three samples".
    """
    sizes = len(left), len(right)
    pooled = np.sort(np.concatenate([left, right]))
    shares = [np.searchsorted(np.sort(each), pooled, "right") / len(each) for each in (left, right)]
    distance = float(np.abs(shares[0] - shares[1]).max())
    # inside[i]: probability that i of the first k values are of `left`, and that the distance was
    # smaller than the observed one after each of them that differs from the next.
    number, total = np.arange(sizes[0] + 1), sum(sizes)
    inside = (number == 0).astype(np.float64)
    for k in range(1, total + 1):
        drawn = inside * (sizes[0] - number) / (total - k + 1)
        inside *= np.clip(sizes[1] - (k - 1 - number), 0, None) / (total - k + 1)
        inside[1:] += drawn[:-1]
        if k == total or pooled[k] > pooled[k - 1]:
            far = np.abs(number / sizes[0] - (k - number) / sizes[1])
            inside[far >= distance * (1 - 1e-9)] = 0.0
    return distance, float(np.clip(1.0 - inside[-1], 0.0, 1.0))
