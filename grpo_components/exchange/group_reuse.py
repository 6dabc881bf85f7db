"""Chooses trained groups that a later step trains again, within `max_staleness` for all tokens.

The priority of a group is the standard deviation of its rewards, halved for each policy version by
which its oldest token is stale. The deviation is the root mean square of reward minus group mean:
for rewards 0 and 1 with success rate p, it is sqrt(p (1 - p)). Where prioritized replay uses |TD
error| (arXiv 1511.05952), this uses |advantage|. For the decay by age see arXiv 2604.16918.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_components.exchange.ledger_entry import LedgerEntry
from grpo_components.exchange.staleness import Reused, StalenessContract
from grpo_components.settings import reused_per_step
from grpo_components.trajectory import GroupSummary

_LARGEST = 2.0**53
"""Upper bound of a group's spread (see `spread`), because receipts cannot store infinity."""


@dataclass
class Candidate:
    """A trained group, with the properties that decide whether it is trained again."""

    group_id: int
    spread: float
    """Population standard deviation of its rewards."""
    oldest_version: int
    """Oldest policy version that sampled one of its tokens."""
    entry: LedgerEntry
    uses: int = 1
    """Number of steps that trained it."""


class GroupReuse:
    """Remembers trained groups, and chooses those that the next step trains again.

    A skipped step (it trained nothing) adds no group, and removes the groups that it reused: one of
    them may have caused the skip. The choice depends only on the steps' groups and versions.
    """

    def __init__(self, contract: StalenessContract, share: float = 0.0, max_uses: int = 1) -> None:
        self.most = reused_per_step(share, contract.groups_per_step)
        """Largest number of groups that a step trains again; 0 if reuse is off."""
        self.share, self.max_uses, self._contract = share, max_uses, contract
        self.candidates: dict[int, Candidate] = {}
        """Groups that may be chosen, by group id."""
        self.trained: Sequence[Candidate] = ()
        """New groups of the step in training."""
        self.chosen: Sequence[Candidate] = ()
        """Groups, sorted by id, that the step in training, or else the next step, trains again."""
        self.metrics: dict[str, float] = {}
        """Metrics of the last step; empty if reuse is off."""

    @property
    def counts(self) -> Reused:
        """How many groups the next steps train again."""
        return Reused(len(self.chosen), self.most)

    @property
    def kept(self) -> list[LedgerEntry]:
        """Ledger entries of the groups that may be reused, sorted by group id."""
        return [self.candidates[group_id].entry for group_id in sorted(self.candidates)]

    def describe(self) -> dict[str, Any]:
        """Return the settings of reuse (`replay_generation`) for receipts; empty if it is off."""
        rule = {"share": self.share, "max_uses": self.max_uses}
        return {"replay_generation": rule} if self.most else {}

    def choose(self, policy_version: int) -> None:
        """Choose the groups that the step starting at `policy_version` trains again, by priority.

        Of groups with equal priority, it prefers those with lower ids. It forgets groups that are
        too old or were trained `max_uses` times.
        """
        self.candidates = {
            group_id: each
            for group_id, each in self.candidates.items()
            if each.uses < self.max_uses
            and self._contract.may_train(each.oldest_version, policy_version)
        }

        def order(candidate: Candidate) -> tuple[float, int]:
            return -self._priority(candidate, policy_version), candidate.group_id

        best = sorted(self.candidates.values(), key=order)[: self.most]
        self.chosen = sorted(best, key=lambda candidate: candidate.group_id)

    def _priority(self, candidate: Candidate, policy_version: int) -> float:
        """Return spread / 2^(age of the oldest token); exact, so the same bits everywhere."""
        age = self._contract.staleness(candidate.oldest_version, policy_version)
        return math.ldexp(candidate.spread, -age)

    def begin_step(
        self, entries: Sequence[LedgerEntry], groups: Sequence[GroupSummary]
    ) -> dict[str, Any]:
        """Remember a step's new groups; return what the event `sample` records about reuse."""
        if not self.most:
            return {}
        self.trained = [
            Candidate(group.group_id, spread(group.rewards), group.oldest_version, entry)
            for entry, group in zip(entries, groups, strict=True)
        ]
        return {
            "worths": [
                {"spread": each.spread, "oldest_version": each.oldest_version}
                for each in self.trained
            ],
            "reused": [{"group": each.group_id, "use": each.uses + 1} for each in self.chosen],
        }

    def end_step(self, before: int, after: int) -> None:
        """End a step from version `before` to `after`: count uses, and choose for the next step."""
        if not self.most:
            return
        ages = [self._contract.staleness(each.oldest_version, before) for each in self.chosen]
        batch = self._contract.groups_per_step
        self.metrics = {
            "reuse/share": len(ages) / batch,
            "reuse/uses_mean": 1 + sum(each.uses for each in self.chosen) / batch,
            "reuse/age_mean": sum(ages) / len(ages) if ages else math.nan,
        }
        for each in self.chosen:
            each.uses += 1
            if after == before:
                del self.candidates[each.group_id]
        if after > before:
            self.candidates |= {each.group_id: each for each in self.trained if each.spread > 0}
        self.trained = ()
        self.choose(after)

    def state_dict(self) -> dict[str, Any]:
        """Return the state between two training steps, as plain values; empty if reuse is off."""
        candidates = (self.candidates[group_id] for group_id in sorted(self.candidates))
        saved = [vars(each) | {"entry": each.entry.state_dict()} for each in candidates]
        return {"reuse": saved} if self.most else {}

    def load_state_dict(self, state: Mapping[str, Any], policy_version: int) -> None:
        """Restore a saved state; the config's settings of reuse may have changed since."""
        saved = state.get("reuse", ()) if self.most else ()
        loaded = [Candidate(**each | {"entry": LedgerEntry(**each["entry"])}) for each in saved]
        self.candidates = {each.group_id: each for each in loaded}
        self.choose(policy_version)


def spread(rewards: Sequence[float]) -> float:
    """Return the population standard deviation of the rewards, without those that are NaN."""
    known = sorted(reward for reward in rewards if not math.isnan(reward))  # any order, same bits
    if not known or known[0] == known[-1]:
        return 0.0  # rounding may give equal rewards a deviation above 0
    mean = sum(known) / len(known)
    squares = sum((reward - mean) * (reward - mean) for reward in known)
    return min(math.sqrt(squares / len(known)), _LARGEST)
