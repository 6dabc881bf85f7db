"""The recipe's own loss: the bits of the component GRPOLoss, and no overflow."""

import math
import pickle
import runpy
from pathlib import Path

import cloudpickle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lib.loss_inputs import evaluated, loss_inputs

from grpo_components.objective.component_errors import name_of
from grpo_components.objective.losses import GRPOLoss, at_step

RECIPE = Path(__file__).parents[2] / "recipes" / "async_grpo_full_finetune_distributed.py"
grpo_loss = runpy.run_path(str(RECIPE))["grpo_loss"]
LOGPROB = st.floats(-12, 0, width=32)
TOKEN = st.tuples(LOGPROB, LOGPROB, st.sampled_from([0.0, 1.0, -1.0, 0.37, -2.5]))


def inputs(tokens, dtype=torch.float32, **given):
    return loss_inputs(*torch.tensor(tokens, dtype=dtype).T.contiguous(), **given)


@given(
    st.lists(TOKEN, min_size=1, max_size=20), st.floats(0.01, 1), st.floats(0.01, 3), st.booleans()
)
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
    losses, gradient, metrics = evaluated(
        at_step(grpo_loss, {"clip_low": 0.2, "clip_high": 0.2}), given
    )
    for values in (losses, gradient, *metrics.values()):
        assert torch.isfinite(values).all()
    if advantage == 0:
        assert losses[0] == 0 and gradient[0] == 0


def test_the_clip_follows_its_schedule():
    ramp = {"schedule": "linear", "start": 0.9, "end": 0.1, "num_steps": 8}
    scheduled = at_step(grpo_loss, {"clip_low": ramp, "clip_high": 0.2})
    for step, clip in ((0, 0.9), (4, 0.5), (8, 0.1)):
        given = inputs([(-1.0, 2.0, -1.0)], step=step)
        assert scheduled(given)[0].item() == pytest.approx(max(math.exp(-3), 1 - clip))


def test_it_has_its_own_name_and_goes_to_the_trainers_by_value():
    loss = at_step(grpo_loss, {"clip_low": 0.2, "clip_high": 0.2})
    assert name_of(loss).endswith(".grpo_loss")
    copy = pickle.loads(cloudpickle.dumps(loss))
    given = inputs([(-1.0, -1.5, 1.0)])
    assert copy(given)[0].item() == loss(given)[0].item()
