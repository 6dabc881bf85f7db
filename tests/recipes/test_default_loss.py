"""The recipe's own loss: the bits of the component GRPOLoss, and no overflow."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lib.loss_inputs import evaluated, loss_inputs, recipe_loss

from grpo_components.objective.losses import GRPOLoss, at_step

grpo_loss = recipe_loss()
LOGPROB = st.floats(-12, 0, width=32)
TOKEN = st.tuples(LOGPROB, LOGPROB, st.sampled_from([0.0, 1.0, -1.0, 0.37, -2.5]))


def inputs(tokens, dtype=torch.float32, **given):
    return loss_inputs(*torch.tensor(tokens, dtype=dtype).T.contiguous(), **given)


TOKENS = st.lists(TOKEN, min_size=1, max_size=20)


@given(TOKENS, st.floats(0.01, 1), st.floats(0.01, 3), st.booleans())
def test_loss_gradient_and_metrics_are_those_of_the_component(tokens, low, high, double):
    made = inputs(tokens, dtype=torch.float64 if double else torch.float32)
    ours = evaluated(at_step(grpo_loss, {"clip_low": low, "clip_high": high}), made)
    theirs = evaluated(GRPOLoss(low, high), made)
    for found, expected in zip(ours[:2], theirs[:2], strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert ours[2].keys() == theirs[2].keys()
    for key, expected in theirs[2].items():
        torch.testing.assert_close(ours[2][key], expected, rtol=0, atol=0)


@pytest.mark.parametrize("gap", [-1e4, -100.0, 100.0, 1e4])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_a_ratio_that_would_overflow_leaves_finite_numbers(gap, advantage):
    given = inputs([(-1.0, -1.0 - gap, advantage), (-1.0, -1.5, 1.0)])
    clipped = at_step(grpo_loss, {"clip_low": 0.2, "clip_high": 0.2})
    losses, gradient, metrics = evaluated(clipped, given)
    for values in (losses, gradient, *metrics.values()):
        assert torch.isfinite(values).all()
    if advantage == 0:
        assert losses[0] == 0 and gradient[0] == 0
