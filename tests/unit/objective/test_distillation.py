"""The teacher's term: its value by hand, and its exact average gradient over a vocabulary."""

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
