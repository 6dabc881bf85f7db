"""Reward shaping: KL and length against their formulas in plain Python, and by hand."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from grpo_components.objective.kl import ESTIMATORS
from grpo_components.objective.reward_shaping import RewardShaping, sequence_kl

SHAPE = (2, 3)
REWARDS = hnp.arrays(np.float64, SHAPE, elements=st.one_of(st.floats(-5, 5), st.just(math.nan)))
TOKENS = hnp.arrays(np.int64, SHAPE, elements=st.integers(0, 100))
KL = hnp.arrays(np.float64, SHAPE, elements=st.floats(-5, 50))
NO_TOKENS = np.zeros(SHAPE, dtype=np.int64)


def shape(shaping, rewards, tokens, kl=None, step=0):
    not_cut_off = np.zeros(rewards.shape, bool)
    batch = {"rewards": rewards, "response_lengths": tokens, "reference_kl": kl}
    return shaping(SimpleNamespace(**batch, cut_off=not_cut_off), step)


def overlong(tokens, longest, cache):
    """DAPO, eq. 13, case by case."""
    if cache == 0 or tokens <= longest - cache:
        return 0.0
    if tokens <= longest:
        return ((longest - cache) - tokens) / cache
    return -1.0


@given(REWARDS, TOKENS, KL, st.floats(0, 2), st.integers(0, 80), st.floats(0, 3))
def test_every_reward_is_its_formula_and_a_failed_sample_stays_failed(
    rewards, tokens, kl, kl_coeff, cache, penalty
):
    before = rewards.copy()
    shaped = shape(RewardShaping(kl_coeff, 80, cache, penalty), rewards, tokens, kl)
    np.testing.assert_array_equal(rewards, before)
    assert shaped.dtype == np.float64
    for index in np.ndindex(SHAPE):
        expected = rewards[index] - kl_coeff * kl[index]
        expected += penalty * overlong(int(tokens[index]), 80, cache)
        assert shaped[index] == pytest.approx(expected, abs=1e-12, nan_ok=True)


@given(REWARDS, TOKENS)
def test_off_changes_nothing_and_needs_no_reference(rewards, tokens):
    shaping = RewardShaping(kl_coeff=0.0, max_response_tokens=64)
    assert not shaping.needs_reference
    np.testing.assert_array_equal(shape(shaping, rewards, tokens, step=3), rewards)


def test_the_kl_coefficient_follows_its_schedule():
    kl_coeff = {"schedule": "linear", "start": 0.2, "end": 0.0, "num_steps": 2}
    shaping = RewardShaping(kl_coeff, 64)
    assert shaping.needs_reference
    rewards, kl = np.zeros(SHAPE), np.ones(SHAPE)
    losses = [-shape(shaping, rewards, NO_TOKENS, kl, step)[0, 0] for step in range(4)]
    assert losses == pytest.approx([0.2, 0.1, 0.0, 0.0])


LOGPROBS = st.tuples(st.floats(-4, 0), st.floats(-4, 0))
RESPONSES = st.lists(st.lists(LOGPROBS, max_size=5), min_size=1, max_size=5)


@pytest.mark.parametrize("estimator", sorted(ESTIMATORS))
@given(responses=RESPONSES)
def test_kl_of_a_response_is_the_sum_over_its_own_tokens(estimator, responses):
    tokens = [pair for response in responses for pair in response]
    own = torch.tensor([pair[0] for pair in tokens], dtype=torch.float64, requires_grad=True)
    other = torch.tensor([pair[1] for pair in tokens], dtype=torch.float64)
    lengths = [len(response) for response in responses]
    kl = sequence_kl(own, other, lengths, estimator)
    each = iter(ESTIMATORS[estimator](own, other).tolist())
    expected = [sum(next(each) for _ in response) for response in responses]
    assert kl == pytest.approx(expected, abs=1e-9)
