"""Warns during a run of what no error shows: a loss out of balance, seeds used twice, bias."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

from grpo_components.records.loss_bias import LossBias
from grpo_components.trajectory import GroupSummary

_SEEDS_KEPT = 100_000
"""Seeds of training samples that are compared with new ones."""
_ROUNDING = 1e-5
"""Largest difference of a loss and its parts, as a share of the largest ratio, loss or 1."""
_MIN_STEPS, _LARGE_KL, _JUMP = 3, 0.1, 20.0
"""Steps before a jump of the mismatch is named; how large it is in nats, and times their median."""


class RunWatch:
    """Shows each kind of warning once in a run."""

    def __init__(self, note: Callable[[str], None], *, averages_tokens: bool, ends: str) -> None:
        self._note, self._averages_tokens, self._ends = note, averages_tokens, ends
        self._shown: set[str] = set()
        self._seeds: dict[int, int] = {}
        """Seed -> group that it sampled for."""
        self._mismatch: deque[float] = deque(maxlen=50)
        self.bias = LossBias()
        """Compares lost groups with trained ones."""

    def count_group(self, group: GroupSummary) -> None:
        """Compare the seeds of a generated group with those of other groups; note its rewards."""
        self.bias.count_group(group)
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
        """Check a step's loss and responses, and its mismatch against that of the steps before."""
        self._check_balance(step, metrics)
        if metrics.get("rollout/cut_off_fraction") == 1.0:
            self._once(  # no warning: an untrained policy may just be long
                "cut off",
                f"step {step}: all responses were cut off at generator.max_response_tokens; only "
                f"{self._ends} would have ended one: does the model end its responses otherwise?",
            )
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
                *("loss/ptx", "ratio/max"),
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
        """Follow an event of the ledger: how do lost groups differ from trained ones."""
        if self.bias.follow(dict(event)):
            for name, what in self.bias.warnings().items():
                self._warn(name, what)

    def _warn(self, kind: str, what: str) -> None:
        self._once(kind, f"warning: {what}")

    def _once(self, kind: str, line: str) -> None:
        if kind not in self._shown:
            self._shown.add(kind)
            self._note(line)
