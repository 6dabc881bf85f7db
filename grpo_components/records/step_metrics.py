"""The numbers of one step, under the keys that every logger gets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from grpo_components.exchange.staleness import StalenessContract
from grpo_components.trajectory import GroupSummary


def rollout_metrics(
    groups: Sequence[GroupSummary], policy_version: int, token_versions: Mapping[int, int]
) -> dict[str, float]:
    """Reward, success, length and staleness of the groups that a step trains.

    Args:
        groups: of the batch.
        policy_version: version that the step starts from.
        token_versions: how many trained tokens each policy version has sampled.

    Returns:
        Means over samples; staleness over trained tokens, in policy versions, and their number.
    """
    samples = [
        (reward, success)
        for group in groups
        for reward, success in zip(group.rewards, group.successes, strict=True)
    ]
    scored = [(reward, success) for reward, success in samples if not math.isnan(reward)]
    tokens = [n for group in groups for n in group.response_tokens]
    trained, staleness = sum(token_versions.values()), StalenessContract.staleness
    version_sum = sum(version * count for version, count in token_versions.items())
    return {
        "rollout/reward_mean": mean([reward for reward, _ in scored]),
        "rollout/success_rate": mean([success for _, success in scored]),
        "rollout/response_tokens_mean": mean(tokens),
        "rollout/trained_tokens": trained,
        "staleness/mean": staleness(version_sum / trained, policy_version) if trained else math.nan,
        "staleness/max": staleness(min(token_versions, default=policy_version), policy_version),
    }


def buffer_metrics(
    waited_s: float, buffered: int, dropped_stale: int, filtered: int, failed_samples: int
) -> dict[str, float]:
    """How a step got its batch.

    Args:
        waited_s: seconds that the trainers waited for it.
        buffered: groups left in the buffer.
        dropped_stale: groups that were found too old.
        filtered: groups that were never buffered, since the start of the run.
        failed_samples: whose reward or environment failed, since the step before.
    """
    return {
        "time/wait_for_batch": waited_s,
        "time/push": 0.0,
        "buffer/size": buffered,
        "buffer/dropped_stale": dropped_stale,
        "buffer/filtered": filtered,
        "rollout/failed_samples": failed_samples,
    }


def mean(values: Sequence[float]) -> float:
    """The mean; NaN of nothing."""
    return sum(values) / len(values) if values else math.nan
