"""The teacher's term: its exact average gradient over a vocabulary."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lib.loss_inputs import loss_inputs

from grpo_components.objective.losses import GRPOLoss, REINFORCELoss
from grpo_components.objective.token_advantages import with_teacher

T = torch.float64
LOGITS = st.lists(st.floats(-2, 2), min_size=4, max_size=4)


def softmax(logits):
    return torch.log_softmax(torch.tensor(logits, dtype=T), 0)


def kl(logprobs, other):
    return (logprobs.exp() * (logprobs - other)).sum()


@pytest.mark.parametrize("loss", [GRPOLoss(clip_low=1.0, clip_high=1e9), REINFORCELoss()])
@given(policy=LOGITS, generator=LOGITS, teacher=LOGITS, coeff=st.floats(0.1, 3))
def test_the_gradient_is_that_of_the_reverse_kl_also_over_stale_samples(
    loss, policy, generator, teacher, coeff
):
    logits = torch.tensor(policy, dtype=T, requires_grad=True)
    sampled, graded = softmax(generator), softmax(teacher)
    (expected,) = torch.autograd.grad(coeff * kl(torch.log_softmax(logits, 0), graded), logits)
    # Of the loss with the term, over the generator's samples: every token of the vocabulary once.
    own = (torch.log_softmax(logits, 0), sampled, torch.zeros(4, dtype=T))
    inputs, _ = with_teacher(loss_inputs(*own, ids=[0] * 4, teacher_logprobs=graded), coeff)
    losses, _ = loss(inputs)
    (found,) = torch.autograd.grad((sampled.exp() * losses).sum(), logits)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
