"""Advantages: worked by hand, and what must hold for any rewards."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from grpo_components.objective.advantages import (
    BatchNormalizedAdvantages,
    BatchScaledAdvantages,
    GroupCenteredAdvantages,
    GroupNormalizedAdvantages,
    LeaveOneOutAdvantages,
)

PER_GROUP = (GroupNormalizedAdvantages, GroupCenteredAdvantages, LeaveOneOutAdvantages)
ALL = (*PER_GROUP, BatchNormalizedAdvantages, BatchScaledAdvantages)

REWARDS = hnp.arrays(np.float64, (3, 4), elements=st.floats(-5, 5).map(lambda x: round(x, 2)))
FAILED = hnp.arrays(np.bool_, (3, 4))

root2, root3 = 2**0.5, 3**0.5
BY_HAND = {
    # Group 1: mean 0.5, deviation 0.5. Group 2: mean 3, deviation sqrt((1 + 1 + 4) / 2) = sqrt(3).
    GroupNormalizedAdvantages: [[1, -1, 0], [-1 / root3, -1 / root3, 2 / root3]],
    GroupCenteredAdvantages: [[0.5, -0.5, 0], [-1, -1, 2]],
    # Others' means: 0.25, 0.75, 0.5, and 3.5, 3.5, 2.
    LeaveOneOutAdvantages: [[0.75, -0.75, 0], [-1.5, -1.5, 3]],
}


@pytest.mark.parametrize("kind", PER_GROUP)
def test_two_groups_of_three_by_hand(kind):
    rewards = np.array([[1.0, 0.0, 0.5], [2.0, 2.0, 5.0]])
    advantages = (kind(eps=1e-9) if kind is GroupNormalizedAdvantages else kind())(rewards)
    np.testing.assert_allclose(advantages, BY_HAND[kind], rtol=1e-6, atol=1e-7)
    assert advantages.dtype == np.float32


def test_one_batch_of_two_groups_of_three_by_hand():
    # Mean 2 over all six, squared gaps 4 1 1 0 0 4: the deviation is sqrt(10 / 5) = sqrt(2).
    rewards = np.array([[0.0, 1.0, 3.0], [2.0, 2.0, 4.0]])
    advantages = BatchNormalizedAdvantages(eps=1e-9)(rewards)
    expected = [[-2 / root2, -1 / root2, 1 / root2], [0, 0, 2 / root2]]
    np.testing.assert_allclose(advantages, expected, rtol=1e-6, atol=1e-7)
    assert advantages.dtype == np.float32


def test_a_batch_scaled_by_its_own_deviation_around_the_means_of_its_groups_by_hand():
    # Group means 4/3 and 8/3; the deviation is that of all six, sqrt(2) as above.
    rewards = np.array([[0.0, 1.0, 3.0], [2.0, 2.0, 4.0]])
    advantages = BatchScaledAdvantages(eps=1e-9)(rewards)
    expected = np.array([[-4, -1, 5], [-2, -2, 4]]) / 3 / root2
    np.testing.assert_allclose(advantages, expected, rtol=1e-6, atol=1e-7)
    assert advantages.dtype == np.float32


@given(rewards=REWARDS, failed=FAILED)
def test_a_scaled_batch_is_trls_batch_scaling(rewards, failed):
    """TRL 1.16, `scale_rewards="batch"`: (r - nanmean of the group) / (nanstd of all + 1e-4)."""
    given_nan = np.where(failed, np.nan, rewards)
    valid = rewards[~failed]
    deviation = valid.std(ddof=1) if len(valid) > 1 else 0.0
    expected = np.zeros(rewards.shape)
    for i, j in np.ndindex(rewards.shape):
        if not failed[i, j]:
            group = rewards[i][~failed[i]]
            expected[i, j] = (rewards[i, j] - group.mean()) / (deviation + 1e-4)
    np.testing.assert_allclose(BatchScaledAdvantages()(given_nan), expected, rtol=1e-5, atol=1e-5)


def test_eps_is_added_to_the_deviation_and_not_to_the_variance():
    rewards = np.array([[1.0, 0.0, 0.5]])  # deviation 0.5
    for kind in (GroupNormalizedAdvantages, BatchNormalizedAdvantages, BatchScaledAdvantages):
        np.testing.assert_allclose(kind(eps=0.5)(rewards), [[0.5, -0.5, 0]], atol=1e-7)


@pytest.mark.parametrize("kind", PER_GROUP)
@given(rewards=REWARDS)
def test_each_group_sums_to_nothing_and_keeps_the_order_of_its_rewards(kind, rewards):
    advantages = kind()(rewards)
    np.testing.assert_allclose(advantages.sum(axis=1), 0, atol=1e-5)
    for row, values in zip(rewards, advantages, strict=True):
        assert all(values[i] >= values[j] for i in range(4) for j in range(4) if row[i] >= row[j])


@given(REWARDS)
def test_a_normalized_batch_sums_to_nothing_and_keeps_the_order_of_all_its_rewards(rewards):
    advantages = BatchNormalizedAdvantages()(rewards).ravel()
    assert advantages.sum() == pytest.approx(0, abs=1e-4)
    assert (np.diff(advantages[np.argsort(rewards.ravel(), kind="stable")]) >= 0).all()


@pytest.mark.parametrize("kind", PER_GROUP)
@given(rewards=REWARDS, failed=st.integers(0, 3))
def test_a_failed_sample_changes_nothing_for_its_siblings(kind, rewards, failed):
    given_nan = rewards.copy()
    given_nan[:, failed] = np.nan
    advantages = kind()(given_nan)
    assert (advantages[:, failed] == 0).all()
    others = np.delete(rewards, failed, axis=1)
    np.testing.assert_array_equal(np.delete(advantages, failed, axis=1), kind()(others))


@given(REWARDS, FAILED)
def test_a_failed_sample_changes_nothing_for_the_rest_of_a_normalized_batch(rewards, failed):
    advantages = BatchNormalizedAdvantages()(np.where(failed, np.nan, rewards))
    assert (advantages[failed] == 0).all()
    alone = BatchNormalizedAdvantages()(rewards[~failed].reshape(1, -1)).ravel()
    np.testing.assert_allclose(advantages[~failed], alone, rtol=1e-5, atol=1e-6)


@given(REWARDS, FAILED)
def test_leave_one_out_subtracts_the_mean_of_the_other_valid_rewards(rewards, failed):
    advantages = LeaveOneOutAdvantages()(np.where(failed, np.nan, rewards))
    for i, j in np.ndindex(rewards.shape):
        others = [rewards[i, k] for k in range(4) if k != j and not failed[i, k]]
        alone = failed[i, j] or not others
        expected = 0 if alone else rewards[i, j] - sum(others) / len(others)
        assert advantages[i, j] == pytest.approx(expected, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("kind", ALL)
@given(rewards=REWARDS, failed=FAILED)
def test_whatever_fails_the_advantages_are_finite(kind, rewards, failed):
    assert np.isfinite(kind()(np.where(failed, np.nan, rewards))).all()


@pytest.mark.parametrize("kind", ALL)
def test_equal_rewards_teach_nothing(kind):
    assert (kind()(np.full((2, 4), 0.7)) == 0).all()


@pytest.mark.parametrize(
    "kind", [GroupNormalizedAdvantages, BatchNormalizedAdvantages, BatchScaledAdvantages]
)
def test_eps_must_be_positive(kind):
    with pytest.raises(ValueError, match=r"advantages\.eps"):
        kind(eps=0)
