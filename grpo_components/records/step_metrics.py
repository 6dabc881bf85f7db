"""Metrics of one training step, by their keys in every logger."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from grpo_components.exchange.staleness import StalenessContract
from grpo_components.trajectory import GroupSummary


def rollout_metrics(
    groups: Sequence[GroupSummary], policy_version: int, token_versions: Mapping[int, int]
) -> dict[str, float]:
    """Reward, success rate, length and staleness of the groups that a step trains.

    Args:
        groups: summaries of the groups in the batch.
        policy_version: policy version before the step.
        token_versions: number of trained tokens by the policy version that sampled them.

    Returns:
        Means over samples, the number of trained tokens, and their staleness in policy versions.
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
    """Buffer and waiting metrics of one step.

    Args:
        waited_s: seconds that the trainers waited for the batch.
        buffered: groups left in the buffer.
        dropped_stale: groups dropped because they were too old.
        filtered: groups discarded before the buffer, since the start of the run.
        failed_samples: samples whose reward or environment failed, since the step before.
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
    """Mean of the values; NaN without values."""
    return sum(values) / len(values) if values else math.nan
