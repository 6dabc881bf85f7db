"""Group-normalised advantages: worked by hand, and what must hold for any rewards."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from grpo_components.objective.advantages import GroupNormalizedAdvantages


def test_two_groups_of_three_by_hand():
    rewards = np.array([[1.0, 0.0, 0.5], [2.0, 2.0, 5.0]])
    advantages = GroupNormalizedAdvantages(eps=1e-9)(rewards)
    # Group 1: mean 0.5, deviation 0.5. Group 2: mean 3, deviation sqrt((1 + 1 + 4) / 2) = sqrt(3).
    expected = [[1.0, -1.0, 0.0], [-1 / 3**0.5, -1 / 3**0.5, 2 / 3**0.5]]
    np.testing.assert_allclose(advantages, expected, rtol=1e-6, atol=1e-7)
    assert advantages.dtype == np.float32


REWARDS = hnp.arrays(np.float64, (3, 4), elements=st.floats(-5, 5).map(lambda x: round(x, 2)))


@given(REWARDS)
def test_each_group_sums_to_nothing_and_keeps_the_order_of_its_rewards(rewards):
    advantages = GroupNormalizedAdvantages()(rewards)
    np.testing.assert_allclose(advantages.sum(axis=1), 0, atol=1e-5)
    for row, values in zip(rewards, advantages, strict=True):
        assert all(values[i] >= values[j] for i in range(4) for j in range(4) if row[i] >= row[j])


@given(REWARDS, st.integers(0, 3))
def test_a_failed_sample_changes_nothing_for_its_siblings(rewards, failed):
    given_nan = rewards.copy()
    given_nan[:, failed] = np.nan
    advantages = GroupNormalizedAdvantages()(given_nan)
    assert (advantages[:, failed] == 0).all()
    others = np.delete(rewards, failed, axis=1)
    np.testing.assert_array_equal(
        np.delete(advantages, failed, axis=1), GroupNormalizedAdvantages()(others)
    )


def test_equal_rewards_teach_nothing():
    assert (GroupNormalizedAdvantages()(np.full((2, 4), 0.7)) == 0).all()


def test_eps_must_be_positive():
    with pytest.raises(ValueError, match=r"advantages\.eps"):
        GroupNormalizedAdvantages(eps=0)
