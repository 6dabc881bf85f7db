"""Chooses trained groups that a later step trains again, while all their tokens are fresh enough.

A group that teaches more goes first: its priority is the standard deviation of its rewards, halved
for each policy version that its oldest token is old. With rewards of 0 and 1 and a success rate p,
the deviation is sqrt(p (1 - p)), the mean size of the group's advantages, which replay buffers rank
by (arXiv 1511.05952, with |advantage| for |TD error|); for the decay by age see arXiv 2604.16918.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from grpo_components.exchange.ledger_entry import LedgerEntry
from grpo_components.exchange.staleness import Reused, StalenessContract
from grpo_components.settings import reused_per_step
from grpo_components.trajectory import GroupSummary

_LARGEST = 2.0**53
"""Largest spread; receipts have no larger number."""


@dataclass
class Candidate:
    """The properties of a trained group on which the choice depends."""

    group_id: int
    spread: float
    """Population standard deviation of its rewards."""
    oldest_version: int
    """Oldest policy version that sampled one of its tokens."""
    uses: int = 1
    """Number of steps that trained it."""


class ReusePool:
    """Remembers trained groups, and chooses those that the next step trains again.

    A step that trained nothing (skipped) adds no group, and removes those that it had reused: one
    of them may be the reason. The choice depends on nothing but the calls of `end_step`.
    """

    def __init__(self, contract: StalenessContract, share: float = 0.0, max_uses: int = 1) -> None:
        self.most = reused_per_step(share, contract.groups_per_step)
        """Largest number of groups that a step trains again."""
        self.candidates: dict[int, Candidate] = {}
        """Groups that may be chosen, by group id."""
        self.share, self.max_uses, self._contract = share, max_uses, contract

    def priority(self, candidate: Candidate, policy_version: int) -> float:
        """Return spread / 2^(age of the oldest token); exact, so the same bits everywhere."""
        age = self._contract.staleness(candidate.oldest_version, policy_version)
        return math.ldexp(candidate.spread, -age)

    def choose(self, policy_version: int) -> list[int]:
        """Return the ids of the groups that the step from this version trains again, sorted.

        They have the highest priorities; of groups with equal priority, the older is chosen.
        """

        def order(candidate: Candidate) -> tuple[float, int]:
            return -self.priority(candidate, policy_version), candidate.group_id

        best = sorted(self.candidates.values(), key=order)[: self.most]
        return sorted(candidate.group_id for candidate in best)

    def end_step(
        self, trained: Iterable[Candidate], reused: Iterable[int], before: int, after: int
    ) -> None:
        """Count the uses of a step, and forget the groups that no later step may train."""
        for group_id in reused:
            if after == before:
                del self.candidates[group_id]
            else:
                self.candidates[group_id].uses += 1
        if after > before and self.most:
            self.candidates |= {each.group_id: each for each in trained if each.spread > 0}
        self.forget(after)

    def forget(self, policy_version: int) -> None:
        """Forget the groups that the step from this version, or a later one, may not train."""
        self.candidates = {
            group_id: each
            for group_id, each in self.candidates.items()
            if each.uses < self.max_uses
            and self._contract.may_train(each.oldest_version, policy_version)
        }


class GroupReuse:
    """Keeps the ledger's entries of the groups in a `ReusePool`, and describes their use."""

    def __init__(self, contract: StalenessContract, share: float = 0.0, max_uses: int = 1) -> None:
        self._pool, self._contract = ReusePool(contract, share, max_uses), contract
        self._entries: dict[int, LedgerEntry] = {}
        self._trained: list[Candidate] = []
        """New groups of the step in training."""
        self.chosen: list[LedgerEntry] = []
        """Groups that the step in training, or else the next step, trains again, by group id."""
        self.metrics: dict[str, float] = {}
        """Metrics of the last step; empty if reuse is off."""

    @property
    def on(self) -> bool:
        """Whether steps may reuse groups."""
        return self._pool.most > 0

    @property
    def counts(self) -> Reused:
        """How many groups the next steps train again."""
        return Reused(len(self.chosen), self._pool.most)

    @property
    def kept(self) -> list[LedgerEntry]:
        """The groups that may be reused, sorted by group id."""
        return [self._entries[group_id] for group_id in sorted(self._entries)]

    @property
    def ids(self) -> tuple[list[int], list[int]] | None:
        """Ids of the chosen groups, and of all that may be reused; None if reuse is off."""
        return (
            ([entry.group_id for entry in self.chosen], sorted(self._entries)) if self.on else None
        )

    def describe(self) -> dict[str, Any]:
        """Return the rule for the receipts: `replay_generation`; empty if reuse is off."""
        rule = {"share": self._pool.share, "max_uses": self._pool.max_uses}
        return {"replay_generation": rule} if self.on else {}

    def begin_step(self, trained: Sequence[GroupSummary]) -> dict[str, Any]:
        """Note the new groups of a step; return the event fields that describe its groups."""
        if not self.on:
            return {}
        self._trained = [
            Candidate(group.group_id, spread(group.rewards), group.oldest_version)
            for group in trained
        ]
        return {
            "worths": [
                {"spread": each.spread, "oldest_version": each.oldest_version}
                for each in self._trained
            ],
            "reused": [
                {
                    "group": entry.group_id,
                    "use": self._pool.candidates[entry.group_id].uses + 1,
                }
                for entry in self.chosen
            ],
        }

    def end_step(self, trained: Iterable[LedgerEntry], before: int, after: int) -> None:
        """Count the uses of a step, and choose groups for the next step."""
        if not self.on:
            return
        reused = [entry.group_id for entry in self.chosen]
        again = [self._pool.candidates[group_id] for group_id in reused]
        ages = [self._contract.staleness(each.oldest_version, before) for each in again]
        batch = self._contract.groups_per_step
        self.metrics = {
            "reuse/share": len(again) / batch,
            "reuse/uses_mean": 1 + sum(each.uses for each in again) / batch,
            "reuse/age_mean": sum(ages) / len(ages) if ages else math.nan,
        }
        self._pool.end_step(self._trained, reused, before, after)
        self._entries |= {entry.group_id: entry for entry in trained}
        self._choose(after)

    def state_dict(self) -> dict[str, Any]:
        """Return the state between two training steps, as plain values; empty if reuse is off."""
        if not self.on:
            return {}
        entries = [vars(entry) | {"text": None, "parts": ()} for entry in self.kept]
        candidates = [asdict(self._pool.candidates[entry.group_id]) for entry in self.kept]
        return {"reuse": {"entries": entries, "candidates": candidates}}

    def load_state_dict(self, state: Mapping[str, Any], policy_version: int) -> None:
        """Restore the state of another pool; the rule may have changed since."""
        saved = state.get("reuse", {}) if self.on else {}
        entries = [LedgerEntry(**entry) for entry in saved.get("entries", ())]
        self._entries = {entry.group_id: entry for entry in entries}
        candidates = [Candidate(**each) for each in saved.get("candidates", ())]
        self._pool.candidates = {each.group_id: each for each in candidates}
        self._pool.forget(policy_version)
        self._choose(policy_version)

    def _choose(self, policy_version: int) -> None:
        known = self._pool.candidates
        self._entries = {number: self._entries[number] for number in sorted(known)}
        for entry in self._entries.values():
            entry.state = "trained"
        self.chosen = [self._entries[number] for number in self._pool.choose(policy_version)]


def spread(rewards: Sequence[float]) -> float:
    """Return the population standard deviation of the rewards, without those that are NaN."""
    known = sorted(reward for reward in rewards if not math.isnan(reward))  # any order, same bits
    if not known or known[0] == known[-1]:
        return 0.0  # rounding may give equal rewards a deviation above 0
    mean = sum(known) / len(known)
    squares = sum((reward - mean) * (reward - mean) for reward in known)
    return min(math.sqrt(squares / len(known)), _LARGEST)
