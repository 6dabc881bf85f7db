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


@given(st.lists(GROUP, max_size=40), st.integers(1, 4))
def test_a_group_is_kept_if_its_valid_rewards_differ_and_too_many_others_in_a_row_end_the_run(
    groups, max_discarded
):
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


def test_the_error_has_the_key_and_the_counts_of_the_groups_in_that_row():
    sampling = DynamicSampling(max_discarded=4)
    sampling.keeps([1.0, 1.0, 1.0], [True] * 3)  # forgotten: a kept group follows
    sampling.keeps([0.0, 1.0, 1.0], [False, True, True])
    for rewards in ([0.0] * 3, [1.0] * 3, [0.0] * 3, [math.nan, math.nan, 1.0]):
        assert not sampling.keeps(rewards, solved(rewards))
    with pytest.raises(StarvedError) as error:
        sampling.keeps([0.0] * 3, [False] * 3)
    assert str(error.value).startswith("dynamic_sampling.max_discarded: 5 groups")
    assert "{0: 3, 1: 1, 3: 1}" in str(error.value)
