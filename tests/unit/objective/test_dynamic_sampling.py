"""Dynamic sampling: which groups are kept, and when the run ends for want of them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_components.errors import StarvedError
from grpo_components.objective.dynamic_sampling import DynamicSampling

REWARD = st.sampled_from([0.0, 0.5, 1.0, math.nan])
GROUP = st.lists(REWARD, min_size=1, max_size=6)


def solved(rewards):
    return [reward == 1.0 for reward in rewards]


@given(GROUP)
def test_a_group_is_kept_exactly_if_its_valid_rewards_differ(rewards):
    valid = [reward for reward in rewards if not math.isnan(reward)]
    differ = any(a != b for a in valid for b in valid)
    assert DynamicSampling(max_discarded=1).keeps(rewards, solved(rewards)) == differ


@given(GROUP)
def test_a_kept_group_has_two_valid_samples(rewards):
    if DynamicSampling(max_discarded=1).keeps(rewards, solved(rewards)):
        assert sum(not math.isnan(reward) for reward in rewards) >= 2


def test_success_decides_nothing_where_the_rewards_differ():
    sampling = DynamicSampling(max_discarded=1)
    assert sampling.keeps([0.1, 0.2], [False, False])
    assert not sampling.keeps([0.3, 0.3], [True, False])


@given(st.lists(GROUP, max_size=40), st.integers(1, 4))
def test_it_starves_exactly_at_one_more_discarded_in_a_row_than_allowed(groups, max_discarded):
    sampling = DynamicSampling(max_discarded)
    in_a_row = 0
    for rewards in groups:
        keeps = len({r for r in rewards if not math.isnan(r)}) > 1
        in_a_row = 0 if keeps else in_a_row + 1
        if in_a_row > max_discarded:
            with pytest.raises(StarvedError, match=rf"{in_a_row} groups in a row"):
                sampling.keeps(rewards, solved(rewards))
            return
        assert sampling.keeps(rewards, solved(rewards)) == keeps


def test_the_error_has_count_histogram_key_and_advice():
    sampling = DynamicSampling(max_discarded=4)
    sampling.keeps([1.0, 1.0, 1.0], [True] * 3)  # forgotten: a kept group follows
    sampling.keeps([0.0, 1.0, 1.0], [False, True, True])
    for rewards in ([0.0] * 3, [1.0] * 3, [0.0] * 3, [math.nan, math.nan, 1.0]):
        assert not sampling.keeps(rewards, solved(rewards))
    with pytest.raises(StarvedError) as error:
        sampling.keeps([0.0] * 3, [False] * 3)
    message = str(error.value)
    assert message.startswith("dynamic_sampling.max_discarded: 5 groups in a row were discarded")
    assert "Successes in group: number of groups = {0: 3, 1: 1, 3: 1}" in message
    assert "1 of them had fewer than 2 samples that did not fail" in message
    assert all(advice in message for advice in ("easier prompts", "harder", "larger group_size"))


def test_failed_samples_are_mentioned_only_where_there_are_any():
    sampling = DynamicSampling(max_discarded=1)
    sampling.keeps([0.0, 0.0], [False, False])
    with pytest.raises(StarvedError) as error:
        sampling.keeps([0.0, 0.0], [False, False])
    assert "did not fail" not in str(error.value)


@pytest.mark.parametrize("bad", [0, -1, 2.5, True, math.nan])
def test_settings_out_of_range_name_their_key(bad):
    with pytest.raises(ValueError, match=r"^dynamic_sampling\.max_discarded: .*; allowed: a whole"):
        DynamicSampling(max_discarded=bad)
