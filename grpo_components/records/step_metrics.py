"""Computes the metrics of one training step, named by the keys that every logger gets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from grpo_components.exchange.staleness import StalenessContract
from grpo_components.trajectory import GroupSummary


def rollout_metrics(
    groups: Sequence[GroupSummary], policy_version: int, token_versions: Mapping[int, int]
) -> dict[str, float]:
    """Compute reward, success rate, length and staleness of the groups that a step trains.

    Args:
        groups: summaries of the groups in the batch.
        policy_version: policy version before the step.
        token_versions: policy version -> number of trained tokens that it sampled.

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
    """Collect the metrics of one step about the buffer and about waiting for a batch.

    Args:
        waited_s: seconds that the trainers waited for the batch.
        buffered: number of groups left in the buffer.
        dropped_stale: number of groups dropped as too old while the batch was taken.
        filtered: number of groups discarded before the buffer, since the start of the run.
        failed_samples: number of samples whose reward or environment failed since the last step.
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
    """Return the mean of the values; NaN if there are none."""
    return sum(values) / len(values) if values else math.nan
