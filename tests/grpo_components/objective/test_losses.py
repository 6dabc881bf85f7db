"""The GRPO objective against a short independent reference, value and gradient, in float64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_components.objective.losses import GRPOLoss, k3

T = torch.float64


def reference_loss(new, old, advantage, ref, low, high, kl_coeff):
    """One token, with Python floats: loss and its derivative by the trainer's logprob."""
    ratio = math.exp(new - old)
    clipped = min(max(ratio, 1 - low), 1 + high)
    if ratio * advantage <= clipped * advantage:
        loss, slope = -ratio * advantage, -ratio * advantage
    else:
        loss, slope = -clipped * advantage, 0.0
    gap = ref - new
    return (
        loss + kl_coeff * (math.exp(gap) - gap - 1),
        slope + kl_coeff * (1 - math.exp(gap)),
    )


LOGPROB = st.floats(-4, 0)
TOKENS = st.lists(st.tuples(LOGPROB, LOGPROB, st.floats(-3, 3), LOGPROB), min_size=1, max_size=6)


@given(TOKENS, st.floats(0.05, 0.9), st.floats(0.05, 2), st.sampled_from([0.0, 0.3]))
def test_value_and_gradient_of_every_token(tokens, low, high, kl_coeff):
    tokens = [
        t for t in tokens if all(abs(math.exp(t[0] - t[1]) - x) > 1e-6 for x in (1 - low, 1 + high))
    ]
    if not tokens:
        return
    new, old, advantage, ref = (torch.tensor(x, dtype=T) for x in zip(*tokens, strict=True))
    new.requires_grad_(True)
    losses, _ = GRPOLoss(low, high, kl_coeff)(new, old, advantage, ref)
    losses.sum().backward()
    for i, token in enumerate(tokens):
        value, slope = reference_loss(*token, low, high, kl_coeff)
        assert losses[i].item() == pytest.approx(value, rel=1e-9, abs=1e-12)
        assert new.grad[i].item() == pytest.approx(slope, rel=1e-9, abs=1e-12)


def test_two_sequences_of_three_tokens_by_hand():
    # ratios 1, 1.5, 0.5 with advantage 1; then the same with advantage -2; clip 0.2.
    log = torch.log(torch.tensor([1.0, 1.5, 0.5, 1.0, 1.5, 0.5], dtype=T))
    advantages = torch.tensor([1.0, 1.0, 1.0, -2.0, -2.0, -2.0], dtype=T)
    losses, metrics = GRPOLoss(0.2, 0.2)(log, torch.zeros(6, dtype=T), advantages, None)
    torch.testing.assert_close(
        losses, torch.tensor([-1.0, -1.2, -0.5, 2.0, 3.0, 1.6], dtype=T), rtol=1e-12, atol=0
    )
    assert metrics["ratio/clip_fraction"].tolist() == [0, 1, 0, 0, 0, 1]
    assert metrics["ratio/mean"].mean().item() == pytest.approx(1.0)
    assert metrics["ratio/max"].max().item() == pytest.approx(1.5)


def test_the_ratio_is_to_the_generator_and_not_to_the_trainer_itself():
    new = torch.tensor([-1.0], dtype=T, requires_grad=True)
    _, metrics = GRPOLoss()(new, torch.tensor([-2.0], dtype=T), torch.ones(1, dtype=T), None)
    assert metrics["ratio/mean"].item() == pytest.approx(math.e)


@given(LOGPROB, LOGPROB)
def test_k3_is_never_negative_and_zero_only_at_equality(a, b):
    value = k3(torch.tensor(a, dtype=T), torch.tensor(b, dtype=T)).item()
    assert value >= 0
    if abs(a - b) > 1e-3:
        assert value > 0


@pytest.mark.parametrize(
    "bad", [{"clip_low": 0}, {"clip_low": 1.5}, {"clip_high": 0}, {"kl_coeff": -1}]
)
def test_settings_out_of_range_name_their_key(bad):
    with pytest.raises(ValueError, match=rf"loss\.{next(iter(bad))}"):
        GRPOLoss(**bad)
