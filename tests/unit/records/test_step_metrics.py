"""The metrics equal those computed directly from every token and sample."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lib.properties import many
from lib.trajectories import response

from grpo_components.records.step_metrics import reward_use, rollout_metrics
from grpo_components.trajectory import pack, summarize

SAMPLES = st.tuples(
    st.lists(st.tuples(st.booleans(), st.integers(0, 50)), min_size=1, max_size=6),
    st.one_of(st.none(), st.floats(-5, 5)),
    st.booleans(),
)
GROUPS = st.lists(st.lists(SAMPLES, min_size=1, max_size=4), min_size=1, max_size=4)


def make(tokens, reward, success, terms=None, finish_reason="stop"):
    """A trajectory of (sampled by the policy, version) tokens; the first is always sampled."""
    mask = np.array([True, *(sampled for sampled, _ in tokens[1:])])
    versions = np.array([version for _, version in tokens], np.int32)
    return response(
        0,
        np.where(mask, versions, -1),
        response_mask=mask,
        finish_reason="error" if reward is None else finish_reason,
        reward=math.nan if reward is None else reward,
        reward_terms=terms or {},
        success=success and reward is not None,
        error="failed" if reward is None else None,
    )


def versions_of(groups):
    """The version of each sampled token."""
    responses = [t for group in groups for t in group]
    return np.concatenate([t.token_versions[t.response_mask] for t in responses])


def measured(groups, policy_version, token_versions=None, reused=()):
    """Metrics of new and reused groups, of which all sampled tokens were trained by default."""
    new, again = ([summarize(pack(group)) for group in part] for part in (groups, reused))
    if token_versions is None:
        token_versions = Counter(versions_of([*groups, *reused]).tolist())
    return rollout_metrics(new, policy_version, token_versions, again)


def of_kind(kind, metrics):
    return {key.removeprefix(kind): metrics[key] for key in metrics if key.startswith(kind)}


def averaged(values):
    return np.mean(values) if len(values) else math.nan


@settings(max_examples=many(40))
@given(GROUPS, st.integers(50, 60))
def test_staleness_is_averaged_over_tokens_and_rewards_over_scored_samples(groups, policy_version):
    groups = [[make(*sample) for sample in group] for group in groups]
    metrics = measured(groups, policy_version)
    records, versions = [t for group in groups for t in group], versions_of(groups)
    staleness = policy_version - versions.astype(float)
    scored = [t for t in records if not t.failed]
    kinds = [{t.reward for t in group if not t.failed} for group in groups]
    expected = {
        "staleness/mean": staleness.mean(),
        "staleness/max": staleness.max(),
        "rollout/response_tokens_mean": len(versions) / len(records),
        "rollout/reward_mean": averaged([t.reward for t in scored]),
        "rollout/success_rate": averaged([t.success for t in scored]),
        "rollout/reward_std": np.std([t.reward for t in scored]) if scored else math.nan,
        "rollout/zero_variance_fraction": averaged([len(each) == 1 for each in kinds if each]),
    }
    assert {key: metrics[key] for key in expected} == pytest.approx(expected, nan_ok=True)


def test_a_reused_group_counts_in_trained_tokens_and_staleness_only():
    new = [[make([(True, 5)] * 3, 1.0, True)]]
    again = [[make([(True, 3)] * 3, 0.0, False, finish_reason="length")]]
    without, metrics = measured(new, 5), measured(new, 5, reused=again)
    changed = {key: metrics[key] for key in metrics if metrics[key] != without[key]}
    assert changed == {"rollout/trained_tokens": 6, "staleness/mean": 1.0, "staleness/max": 2}


def test_staleness_counts_only_trained_tokens():
    groups = [[make([(True, 5)] * 3, 1.0, True), make([(True, 3)], 1.0, True)]]
    metrics = measured(groups, 5, {5: 3})
    assert (metrics["staleness/mean"], metrics["staleness/max"]) == (0, 0)
    nothing = measured(groups, 5, {})
    assert math.isnan(nothing["staleness/mean"]) and nothing["staleness/max"] == 0


def step(*groups):
    return measured(groups, 0, {})


OWN, OTHER = (True, 0), (False, 0)


def test_each_reward_term_has_mean_and_deviation_over_the_samples_that_have_it():
    """A world may reward only some turns; a failed sample's terms do not count."""
    scored = [(5.0, {"a": 1.0, "b": 4.0}), (3.0, {"a": 3.0}), (None, {"a": 100.0})]
    metrics = step([make([OWN], reward, False, terms) for reward, terms in scored])
    assert of_kind("reward_terms/", metrics) == {
        "a_mean": 2.0,
        "a_std": 1.0,
        "b_mean": 4.0,
        "b_std": 0.0,
    }


def test_the_share_that_is_cut_off_and_the_turns_are_those_of_scored_samples():
    cut = make([OWN, OTHER, OTHER, OWN, OWN, OTHER, OWN], 0.0, False, finish_reason="length")
    metrics = step([cut, make([OWN, OTHER], 1.0, True), make([OWN, OTHER, OWN], None, False)])
    assert metrics["rollout/cut_off_fraction"] == 0.5
    assert (metrics["rollout/turns_mean"], metrics["rollout/turns_max"]) == (2.0, 3)


def test_what_no_sample_has_is_nan():
    metrics = step([make([OWN], None, False)] * 2)
    undefined = {key for key, value in metrics.items() if math.isnan(value)}
    names = ("reward_mean", "reward_std", "success_rate", "cut_off_fraction", "turns_mean")
    assert undefined == {
        *(f"rollout/{name}" for name in (*names, "turns_max", "zero_variance_fraction")),
        "staleness/mean",
    }


def test_the_sessions_of_agents_are_added_up_with_what_failed():
    """Four sampled tokens of a failed session count as sampled, and are not trained."""
    facts = {"calls": 3, "trajectories": 2, "prompt_tokens": 40, "cached_tokens": 10}
    facts["sampled_tokens"] = 5
    first = replace(make([OWN], 1.0, True), session={"sample": 0, **facts})
    part = replace(make([OWN, OWN], 1.0, True), session={"sample": 0})
    failed = replace(
        response(0, [], finish_reason="error", reward=math.nan, error="failed"),
        session={"sample": 1, **facts, "sampled_tokens": 4},
    )
    metrics = measured([[first, part, failed]], 50)
    assert of_kind("agents/", metrics) == {
        **{"calls_mean": 3.0, "trajectories_mean": 2.0},
        **{"cached_share": 0.25, "trained_share": pytest.approx(3 / 9)},
    }
    assert not of_kind("agents/", step([make([OWN], 1.0, True)]))


def test_what_rewards_used_is_added_up_over_generators_and_counted_once():
    used = [Counter({"judge_tokens": 5.0, "judge_failures": 0.0}), Counter({"judge_tokens": 2.0})]
    assert reward_use(used) == {"reward_use/judge_tokens": 7.0, "reward_use/judge_failures": 0.0}
    assert reward_use(used) == {}
