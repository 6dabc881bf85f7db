"""Computes the metrics of one training step, under the names by which every logger gets them."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from grpo_components.exchange.staleness import StalenessContract
from grpo_components.trajectory import GroupSummary


def rollout_metrics(
    groups: Sequence[GroupSummary],
    policy_version: int,
    token_versions: Mapping[int, int],
    reused: Sequence[GroupSummary] = (),
) -> dict[str, float]:
    """Compute rewards, success rate, lengths and turns of new groups; staleness of all tokens.

    Failed samples count only in the number of tokens. A value that no sample has is NaN.
    `token_versions`: policy version -> trained tokens; `reused`: groups that are trained again.
    """
    scored = [sample for group in groups for sample in _scored(group)]
    rewards = [group.rewards[i] for group, i in scored]
    turns = [group.turns[i] for group, i in scored]
    of_groups = [[group.rewards[i] for group, i in _scored(group)] for group in groups]
    tokens = [n for group in groups for n in group.response_tokens]
    again = sum(n for group in reused for n in group.response_tokens)
    trained, staleness = sum(token_versions.values()), StalenessContract.staleness
    version_sum = sum(version * count for version, count in token_versions.items())
    return {
        "rollout/reward_mean": mean(rewards),
        "rollout/reward_std": deviation(rewards),
        "rollout/zero_variance_fraction": mean([min(r) == max(r) for r in of_groups if r]),
        "rollout/success_rate": mean([group.successes[i] for group, i in scored]),
        "rollout/response_tokens_mean": mean(tokens),
        "rollout/cut_off_fraction": mean([g.finish_reasons[i] == "length" for g, i in scored]),
        "rollout/turns_mean": mean(turns),
        "rollout/turns_max": max(turns, default=math.nan),
        "rollout/trained_tokens": trained,
        **_reward_terms(scored),
        "staleness/mean": staleness(version_sum / trained, policy_version) if trained else math.nan,
        "staleness/max": staleness(min(token_versions, default=policy_version), policy_version),
        **_session_metrics(groups, trained / max(sum(tokens) + again, 1)),
    }


def session_counts(groups: Sequence[GroupSummary]) -> Counter[str]:
    """Sum the counts of agents' sessions, e.g. model calls, over groups; empty without agents."""
    return sum((Counter(group.sessions) for group in groups), Counter[str]())


def _session_metrics(groups: Sequence[GroupSummary], trained_share: float) -> dict[str, float]:
    counts = session_counts(groups)
    if not counts:
        return {}
    return {
        "agents/calls_mean": counts["calls"] / counts["count"],
        "agents/trajectories_mean": counts["trajectories"] / counts["count"],
        "agents/cached_share": counts["cached_tokens"] / max(counts["prompt_tokens"], 1),
        "agents/trained_share": trained_share,
    }


def _scored(group: GroupSummary) -> list[tuple[GroupSummary, int]]:
    """Return the samples of a group that did not fail, as pairs (group, index)."""
    return [(group, i) for i, reward in enumerate(group.rewards) if not math.isnan(reward)]


def _reward_terms(scored: Sequence[tuple[GroupSummary, int]]) -> dict[str, float]:
    """Return mean and deviation of each reward term, over the samples that have it."""
    terms: defaultdict[str, list[float]] = defaultdict(list)
    for group, i in scored:
        for name, value in group.reward_terms[i].items():
            terms[name].append(value)
    return {
        f"reward_terms/{name}_{kind}": of(values)
        for name, values in terms.items()
        for kind, of in (("mean", mean), ("std", deviation))
    }


def reward_use(used: Sequence[Counter[str]]) -> dict[str, float]:
    """Return what rewards used since the last step, e.g. a judge's tokens; reset the counts."""
    total = Counter[str]()
    for counts in used:
        total.update(counts)  # unlike a sum, it keeps what is 0
        counts.clear()
    return {f"reward_use/{name}": value for name, value in total.items()}


def mean(values: Sequence[float]) -> float:
    """Return the mean of the values; NaN if there are none."""
    return sum(values) / len(values) if values else math.nan


def deviation(values: Sequence[float]) -> float:
    """Return the population standard deviation of the values; NaN if there are none."""
    if not values:
        return math.nan
    if min(values) == max(values):
        return 0.0  # numpy rounds the mean, so its deviation of equal values may be above 0
    with np.errstate(over="ignore"):  # huge rewards give infinity, which is logged as null
        return float(np.std(values))
