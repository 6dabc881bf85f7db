"""Warns during a run of what no error shows: a loss out of balance, seeds used twice, bias."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from grpo_components.trajectory import GroupSummary

_SEEDS_KEPT = 100_000
"""Seeds of training samples that are compared with new ones."""
_ROUNDING = 1e-5
"""Largest difference of a loss and its parts, as a share of the largest ratio, loss or 1."""
_MIN_STEPS, _LARGE_KL, _JUMP = 3, 0.1, 20.0
"""Steps before a jump of the mismatch is named; how large it is in nats, and times their median."""
_MIN_DROPPED, _CHANCE = 8, 1e-4
"""Dropped groups from which on lengths are compared, and the chance of a false warning by one."""


class RunWatch:
    """Shows each kind of warning once in a run.

    Args:
        note: function that shows a line to the user.
        averages_tokens: whether the loss is the mean over the tokens, so that `loss/total` is the
            sum of its parts.
    """

    def __init__(self, note: Callable[[str], None], *, averages_tokens: bool) -> None:
        self._note, self._averages_tokens = note, averages_tokens
        self._shown: set[str] = set()
        self._seeds: dict[int, int] = {}
        """Seed -> group that it sampled for."""
        self._lengths: dict[int, float] = {}
        """Group that is not trained or dropped yet -> mean tokens of its responses."""
        self._mismatch: deque[float] = deque(maxlen=50)
        self._trained: list[float] = []
        self._dropped: list[float] = []
        self._compare_at = _MIN_DROPPED

    def count_group(self, group: GroupSummary) -> None:
        """Compare the seeds of a generated group with those of other groups.

        Args:
            group: summary of the group.
        """
        for seed in group.seeds:
            other = self._seeds.setdefault(seed, group.group_id)
            if other != group.group_id or group.seeds.count(seed) > 1:
                self._warn(
                    "seeds",
                    f"groups {other} and {group.group_id} have samples of the same seed ({seed}): "
                    "their random numbers are the same",
                )
        while len(self._seeds) > _SEEDS_KEPT:
            del self._seeds[next(iter(self._seeds))]

    def check_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Check the balance of a step's loss, and its mismatch against that of the steps before.

        Args:
            step: training step, from 1.
            metrics: metrics of the step.
        """
        self._check_balance(step, metrics)
        kl = metrics.get("mismatch/generator_kl", math.nan)
        if not math.isfinite(kl):
            return
        usual = median(self._mismatch) if len(self._mismatch) >= _MIN_STEPS else math.inf
        if kl > max(_LARGE_KL, _JUMP * usual):
            self._warn(
                "mismatch",
                f"step {step}: mismatch/generator_kl is {kl:.3g}, the median of the "
                f"{len(self._mismatch)} steps before is {usual:.3g}: some tokens are not those "
                "that were sampled, or the policy has jumped",
            )
        self._mismatch.append(kl)

    def _check_balance(self, step: int, metrics: Mapping[str, Any]) -> None:
        total, known, penalty, *others, ratio = (
            float(metrics.get(name, math.nan))
            for name in (
                *("loss/total", "loss/policy", "loss/penalty"),
                *("loss/load_balancing", "loss/ptx", "ratio/max"),
            )
        )
        known += 0.0 if math.isnan(penalty) else penalty
        has_others = any(not math.isnan(each) for each in others)
        if not self._averages_tokens or has_others or not math.isfinite(total - known):
            return
        if abs(total - known) > _ROUNDING * max(1.0, abs(total), abs(known), ratio):
            self._warn(
                "loss",
                f"step {step}: loss/total is {total:.5g}, but the mean of its parts over the "
                f"tokens is {known:.5g}: tokens do not weigh the same, as where each rank or "
                "micro-batch divides by its own number of tokens",
            )

    def follow(self, event: Mapping[str, Any]) -> None:
        """Follow an event of the ledger: how long are the groups that are dropped as too old.

        Args:
            event: event, as in `logs/events.jsonl`.
        """
        if event["event"] == "finish":
            tokens = event["response_tokens"]
            self._lengths[event["group"]] = sum(tokens) / max(len(tokens), 1)
        elif event["event"] == "sample":
            self._trained += self._take(event["groups"])
        elif event["event"] == "drop":
            lengths = self._take(event["groups"])
            if event["reason"] == "stale":
                self._dropped += lengths
        if len(self._dropped) >= self._compare_at and len(self._trained) >= self._compare_at:
            self._compare_at *= 2
            self._compare_lengths()

    def _take(self, groups: Sequence[int]) -> list[float]:
        return [self._lengths.pop(group) for group in groups if group in self._lengths]

    def _compare_lengths(self) -> None:
        distance = _distance(self._dropped, self._trained)
        sizes = len(self._dropped), len(self._trained)
        chance = 2 * math.exp(-2 * distance**2 * math.prod(sizes) / sum(sizes))
        means = [float(np.mean(each)) for each in (self._dropped, self._trained)]
        if chance > _CHANCE:
            return
        kind = "longer" if means[0] > means[1] else "shorter"
        self._warn(
            "lengths",
            f"dropped groups are {kind}: the {sizes[0]} dropped as stale have {means[0]:.3g} "
            f"tokens per response, the {sizes[1]} trained ones {means[1]:.3g} "
            f"(Kolmogorov-Smirnov {distance:.2f}, chance {chance:.1g}): what is trained is biased; "
            "stale_groups: wait, stale_tokens: mask or a larger max_staleness keeps them",
        )

    def _warn(self, kind: str, what: str) -> None:
        if kind not in self._shown:
            self._shown.add(kind)
            self._note(f"warning: {what}")


def _distance(left: Sequence[float], right: Sequence[float]) -> float:
    """Return the largest distance of two samples' distribution functions (Kolmogorov-Smirnov)."""
    at = np.concatenate([left, right])
    shares = [np.searchsorted(np.sort(each), at, "right") / len(each) for each in (left, right)]
    return float(np.abs(shares[0] - shares[1]).max())
