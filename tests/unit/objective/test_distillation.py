"""The teacher's term: its value by hand, and its exact average gradient over a vocabulary."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lib.loss_inputs import loss_inputs

from grpo_components.objective.losses import GRPOLoss, REINFORCELoss
from grpo_components.objective.token_advantages import with_teacher

T = torch.float64
LOGITS = st.lists(st.floats(-2, 2), min_size=4, max_size=4)


def inputs_of(policy, generator, teacher, advantages=None):
    advantages = torch.zeros(len(policy), dtype=T) if advantages is None else advantages
    ids = [0] * len(policy)
    return loss_inputs(policy, generator, advantages, ids=ids, teacher_logprobs=teacher)


def softmax(logits):
    return torch.log_softmax(torch.tensor(logits, dtype=T), 0)


def kl(logprobs, other):
    return (logprobs.exp() * (logprobs - other)).sum()


def average_gradient(loss, logits, generator, teacher, coeff):
    """By the logits, of the loss with the term, over the generator's samples: exact."""
    policy = torch.log_softmax(logits, 0)
    inputs, _ = with_teacher(inputs_of(policy, generator, teacher), coeff)
    losses, _ = loss(inputs)
    (found,) = torch.autograd.grad((generator.exp() * losses).sum(), logits)
    return found


def test_the_advantage_of_each_token_by_hand():
    """Also beside other advantages, and with a gradient of the logprobs that must not enter."""
    policy = torch.tensor([-1.0, -2.0, -0.5], dtype=T, requires_grad=True)
    teacher = torch.tensor([-1.5, -0.5, -0.5], dtype=T)
    given_ones = torch.tensor([1.0, -1.0, 0.25], dtype=T)
    inputs = inputs_of(policy, policy.detach() + 0.1, teacher, given_ones)
    found, metrics = with_teacher(inputs, 2.0)
    np.testing.assert_allclose(found.advantages.numpy(), [1 - 2 * 0.5, -1 + 2 * 1.5, 0.25])
    assert not found.advantages.requires_grad and found.trainer_logprobs is policy
    np.testing.assert_allclose(metrics["teacher/kl"].numpy(), [0.5, -1.5, 0.0])
    gaps = np.array([-0.5, 1.5, 0.0])
    np.testing.assert_allclose(metrics["teacher/kl_k3"].numpy(), np.exp(gaps) - gaps - 1)
    without = replace(inputs, teacher_logprobs=None)
    assert with_teacher(without, 2.0) == (without, {})


@pytest.mark.parametrize("loss", [GRPOLoss(clip_low=1.0, clip_high=1e9), REINFORCELoss()])
@given(policy=LOGITS, generator=LOGITS, teacher=LOGITS, coeff=st.floats(0.1, 3))
def test_the_gradient_is_that_of_the_reverse_kl_also_over_stale_samples(
    loss, policy, generator, teacher, coeff
):
    logits = torch.tensor(policy, dtype=T, requires_grad=True)
    sampled, graded = softmax(generator), softmax(teacher)
    (expected,) = torch.autograd.grad(coeff * kl(torch.log_softmax(logits, 0), graded), logits)
    found = average_gradient(loss, logits, sampled, graded, coeff)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
