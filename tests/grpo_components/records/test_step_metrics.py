"""The metrics equal those computed directly from every token and sample."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_components.records.step_metrics import mean, rollout_metrics
from grpo_components.trajectory import Trajectory, pack, summarize

SAMPLES = st.tuples(
    st.lists(st.tuples(st.booleans(), st.integers(0, 50)), min_size=1, max_size=6),
    st.one_of(st.none(), st.floats(-5, 5)),
    st.booleans(),
)
GROUPS = st.lists(st.lists(SAMPLES, min_size=1, max_size=4), min_size=1, max_size=4)


def make(tokens, reward, success):
    """A trajectory of (sampled by the policy, version) tokens; the first is always sampled."""
    mask = np.array([True, *(sampled for sampled, _ in tokens[1:])])
    versions = np.array([version for _, version in tokens], np.int32)
    return Trajectory(
        prompt_ids=np.array([1]),
        response_ids=np.zeros(len(mask), np.int64),
        response_mask=mask,
        generator_logprobs=np.zeros(len(mask), np.float32),
        token_versions=np.where(mask, versions, -1).astype(np.int32),
        prompt_index=0,
        epoch=0,
        group_id=0,
        attempt=0,
        finish_reason="error" if reward is None else "stop",
        reward=math.nan if reward is None else reward,
        success=success and reward is not None,
        error="failed" if reward is None else None,
    )


def counted(groups):
    """Number of sampled tokens by policy version."""
    records = [t for group in groups for t in group]
    return Counter(v for t in records for v in t.token_versions[t.response_mask].tolist())


@settings(max_examples=40)
@given(GROUPS, st.integers(50, 60))
def test_staleness_is_averaged_over_tokens_and_rewards_over_scored_samples(groups, policy_version):
    groups = [[make(*sample) for sample in group] for group in groups]
    summaries = [summarize(pack(group)) for group in groups]
    metrics = rollout_metrics(summaries, policy_version, counted(groups))
    records = [t for group in groups for t in group]
    versions = np.concatenate([t.token_versions[t.response_mask] for t in records])
    staleness = policy_version - versions.astype(float)
    scored = [t for t in records if not t.failed]
    assert metrics["staleness/mean"] == pytest.approx(staleness.mean())
    assert metrics["staleness/max"] == staleness.max()
    tokens_per_sample = len(versions) / len(records)
    assert metrics["rollout/response_tokens_mean"] == pytest.approx(tokens_per_sample)
    expected = (
        [np.mean([t.reward for t in scored]), np.mean([t.success for t in scored])]
        if (scored)
        else [math.nan, math.nan]
    )
    actual = [metrics["rollout/reward_mean"], metrics["rollout/success_rate"]]
    assert actual == pytest.approx(expected, nan_ok=True)


def test_a_batch_sampled_half_one_and_half_three_versions_ago():
    groups = [[make([(True, 9)] * 2, 1.0, True)], [make([(True, 7), (True, 7)], 0.0, False)]]
    metrics = rollout_metrics([summarize(pack(group)) for group in groups], 10, counted(groups))
    assert metrics == {
        "rollout/reward_mean": 0.5,
        "rollout/success_rate": 0.5,
        "rollout/response_tokens_mean": 2.0,
        "rollout/trained_tokens": 4,
        "staleness/mean": 2.0,
        "staleness/max": 3,
    }


def test_a_long_response_weighs_more_in_the_mean_staleness_than_a_short_one():
    groups = [[make([(True, 5)] * 9, 1.0, True), make([(True, 3)], 1.0, True)]]
    metrics = rollout_metrics([summarize(pack(group)) for group in groups], 5, counted(groups))
    assert metrics["staleness/mean"] == pytest.approx(0.2)


def test_staleness_counts_only_trained_tokens():
    groups = [[make([(True, 5)] * 3, 1.0, True), make([(True, 3)], 1.0, True)]]
    metrics = rollout_metrics([summarize(pack(group)) for group in groups], 5, {5: 3})
    assert (metrics["staleness/mean"], metrics["staleness/max"]) == (0, 0)
    nothing = rollout_metrics([summarize(pack(group)) for group in groups], 5, {})
    assert math.isnan(nothing["staleness/mean"]) and nothing["staleness/max"] == 0


def test_the_mean_without_values_is_nan():
    assert math.isnan(mean([]))
    assert mean([1.0, 2.0]) == 1.5
