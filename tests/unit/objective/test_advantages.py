"""Advantages against their formulas in plain Python, and what must hold for any rewards."""

import statistics

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

REWARDS = hnp.arrays(np.float64, (3, 4), elements=st.floats(-5, 5).map(lambda x: round(x, 2)))
FAILED = hnp.arrays(np.bool_, (3, 4))
EPS = 1e-2


def mean(values):
    return sum(values) / len(values)


def deviation(values):
    return statistics.stdev(values) if len(values) > 1 else 0.0


# The formulas: from a reward, the valid rewards of its group and those of the batch.


def leave_one_out(reward, group, batch):
    others = list(group)
    others.remove(reward)
    return reward - mean(others) if others else 0.0


FORMULAS = {
    GroupNormalizedAdvantages: lambda r, group, batch: (r - mean(group)) / (deviation(group) + EPS),
    GroupCenteredAdvantages: lambda r, group, batch: r - mean(group),
    LeaveOneOutAdvantages: leave_one_out,
    BatchNormalizedAdvantages: lambda r, group, batch: (r - mean(batch)) / (deviation(batch) + EPS),
    # TRL 1.16, `scale_rewards="batch"`: (r - nanmean of the group) / (nanstd of all + 1e-4).
    BatchScaledAdvantages: lambda r, group, batch: (r - mean(group)) / (deviation(batch) + EPS),
}
NORMALIZED = (GroupNormalizedAdvantages, BatchNormalizedAdvantages, BatchScaledAdvantages)
every_kind = pytest.mark.parametrize("kind", FORMULAS)


@every_kind
@given(rewards=REWARDS, failed=FAILED)
def test_advantages_are_their_formula_over_the_samples_that_did_not_fail(kind, rewards, failed):
    component = kind(eps=EPS) if kind in NORMALIZED else kind()
    advantages = component(np.where(failed, np.nan, rewards))
    assert advantages.dtype == np.float32
    batch = rewards[~failed].tolist()
    for i, j in np.ndindex(rewards.shape):
        group = rewards[i][~failed[i]].tolist()
        expected = 0.0 if failed[i, j] else FORMULAS[kind](rewards[i, j], group, batch)
        assert advantages[i, j] == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("kind", NORMALIZED)
def test_eps_must_be_positive(kind):
    with pytest.raises(ValueError, match=r"advantages\.eps"):
        kind(eps=0)
