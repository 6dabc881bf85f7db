"""The KL estimators: their value, and the exact average of their gradient over a vocabulary."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_components.objective.kl import ESTIMATORS, k1, k2, k3

T = torch.float64
LOGPROB = st.floats(-6, 0)
LOGITS = st.lists(st.floats(-2, 2), min_size=4, max_size=4)


def by_hand(name, policy, other):
    """Value and derivative by the policy's logprob, with Python floats."""
    gap = other - policy
    return {
        "k1": (-gap, 1.0),
        "k2": (gap * gap / 2, -gap),
        "k3": (math.exp(gap) - gap - 1, 1 - math.exp(gap)),
    }[name]


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
@given(policy=LOGPROB, other=LOGPROB)
def test_value_and_gradient_of_every_token(name, policy, other):
    logprobs = torch.tensor([policy], dtype=T, requires_grad=True)
    estimate = ESTIMATORS[name](logprobs, torch.tensor([other], dtype=T))
    estimate.sum().backward()
    value, slope = by_hand(name, policy, other)
    assert estimate.item() == pytest.approx(value, rel=1e-9, abs=1e-12)
    assert logprobs.grad.item() == pytest.approx(slope, rel=1e-9, abs=1e-12)


def kl(logprobs, other):
    return (logprobs.exp() * (logprobs - other)).sum()


def average_gradient(estimator, logits, other):
    """Of the estimator as a loss, over the policy's own samples: exact, no sampling."""
    logprobs = torch.log_softmax(logits, 0)
    return torch.autograd.grad((logprobs.detach().exp() * estimator(logprobs, other)).sum(), logits)


@given(LOGITS, LOGITS)
def test_in_the_loss_k1_pulls_nowhere_k2_along_the_kl_and_k3_along_the_reversed_kl(values, others):
    logits = torch.tensor(values, dtype=T, requires_grad=True)
    other = torch.log_softmax(torch.tensor(others, dtype=T), 0)
    (to_other,) = torch.autograd.grad(kl(torch.log_softmax(logits, 0), other), logits)
    (from_other,) = torch.autograd.grad(kl(other, torch.log_softmax(logits, 0)), logits)
    for estimator, expected in ((k1, 0 * logits), (k2, to_other), (k3, from_other)):
        (gradient,) = average_gradient(estimator, logits, other)
        torch.testing.assert_close(gradient, expected.detach(), rtol=1e-9, atol=1e-12)


@given(LOGITS, LOGITS)
def test_k1_in_the_reward_has_the_gradient_of_k2_in_the_loss(values, others):
    logits = torch.tensor(values, dtype=T, requires_grad=True)
    other = torch.log_softmax(torch.tensor(others, dtype=T), 0)
    logprobs = torch.log_softmax(logits, 0)
    # REINFORCE on the reward -k1: the loss k1 log pi, with k1 as a plain number.
    reward_loss = (logprobs.detach().exp() * k1(logprobs.detach(), other) * logprobs).sum()
    (in_the_reward,) = torch.autograd.grad(reward_loss, logits)
    (in_the_loss,) = average_gradient(k2, logits, other)
    torch.testing.assert_close(in_the_reward, in_the_loss, rtol=1e-9, atol=1e-12)


@given(LOGITS, LOGITS)
def test_k1_and_k3_are_unbiased(values, others):
    logprobs = torch.log_softmax(torch.tensor(values, dtype=T), 0)
    other = torch.log_softmax(torch.tensor(others, dtype=T), 0)
    for estimator in (k1, k3):
        average = (logprobs.exp() * estimator(logprobs, other)).sum()
        torch.testing.assert_close(average, kl(logprobs, other), rtol=1e-9, atol=1e-12)
