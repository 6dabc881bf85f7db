"""Every policy objective against a short independent reference, value and gradient, in float64."""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lib.loss_inputs import loss_inputs

from grpo_components.objective.composition import Penalties, objective_losses
from grpo_components.objective.losses import (
    CISPOLoss,
    DecoupledPPOLoss,
    GRPOLoss,
    GSPOLoss,
    REINFORCELoss,
)

T = torch.float64


def close(found, expected):
    expected = torch.tensor(expected, dtype=T)
    torch.testing.assert_close(found.detach(), expected, rtol=1e-9, atol=1e-12)


@dataclass(frozen=True)
class Token:
    new: float
    generator: float
    proximal: float
    reference: float
    entropy: float
    weight: float
    staleness: int


# The references: from one response's kept tokens, their anchor and advantage to each token's policy
# loss, and to the derivative of the weighted sum by each token's logprob. Plain Python.


def clipped(ratio, advantage, low, high):
    """-min(rho A, clip(rho) A), and its derivative by log rho."""
    bounded = min(max(ratio, 1 - low), 1 + high)
    if ratio * advantage <= bounded * advantage:
        return -ratio * advantage, -ratio * advantage
    return -bounded * advantage, 0.0


def grpo(tokens, anchors, advantage, low, high):
    ratios = [math.exp(t.new - a) for t, a in zip(tokens, anchors, strict=True)]
    pairs = [clipped(ratio, advantage, low, high) for ratio in ratios]
    slopes = [t.weight * pair[1] for t, pair in zip(tokens, pairs, strict=True)]
    return [pair[0] for pair in pairs], slopes


def gspo(tokens, anchors, advantage, low, high):
    gaps = [t.new - a for t, a in zip(tokens, anchors, strict=True)]
    value, slope = clipped(math.exp(sum(gaps) / len(gaps)), advantage, low, high)
    # Each token moves log s by 1 / n, and s stands in the loss of each.
    moved = sum(t.weight for t in tokens) * slope / len(tokens)
    return [value] * len(tokens), [moved] * len(tokens)


def cispo(tokens, anchors, advantage, low, high):
    ratios = [math.exp(t.new - a) for t, a in zip(tokens, anchors, strict=True)]
    factors = [-min(max(ratio, 1 - low), 1 + high) * advantage for ratio in ratios]
    pairs = list(zip(tokens, factors, strict=True))
    return [factor * t.new for t, factor in pairs], [t.weight * factor for t, factor in pairs]


def reinforce(tokens, anchors, advantage, low, high):
    return cispo(tokens, anchors, advantage, 1.0, high)


def decoupled(tokens, anchors, advantage, low, high):
    cuts = [min(math.exp(a - t.generator), 1.5) for t, a in zip(tokens, anchors, strict=True)]
    pairs = zip(*grpo(tokens, anchors, advantage, low, high), strict=True)
    cut = [(c * value, c * slope) for c, (value, slope) in zip(cuts, pairs, strict=True)]
    return zip(*cut, strict=True)


def kl(name, policy, other):
    gap = other - policy
    return {
        "k1": (-gap, 1.0),
        "k2": (gap * gap / 2, -gap),
        "k3": (math.exp(gap) - gap - 1, 1 - math.exp(gap)),
    }[name]


def proximal(token):
    return token.proximal


def generator(token):
    return token.generator


def loglinear(token):
    """A-3PO, arXiv 2512.06547: alpha = 0 where d = 0, else 1 / d, weighs the behaviour policy."""
    alpha = 1 / token.staleness if token.staleness else 0.0
    return alpha * token.generator + (1 - alpha) * token.new


def clipping(kind, **fixed):
    return lambda low, high: kind(clip_low=low, clip_high=high, **fixed)


def bounded_above(low, high):
    return REINFORCELoss(max_ratio=1 + high)


recomputed = clipping(DecoupledPPOLoss, max_weight=1.5)
interpolated = clipping(DecoupledPPOLoss, max_weight=1.5, proximal="loglinear")

CASES = {
    "grpo": (clipping(GRPOLoss), grpo, generator),
    "grpo, proximal": (clipping(GRPOLoss), grpo, proximal),
    "gspo": (clipping(GSPOLoss), gspo, generator),
    "gspo, proximal": (clipping(GSPOLoss), gspo, proximal),
    "cispo": (clipping(CISPOLoss), cispo, generator),
    "cispo, proximal": (clipping(CISPOLoss), cispo, proximal),
    "reinforce": (bounded_above, reinforce, generator),
    "reinforce, proximal": (bounded_above, reinforce, proximal),
    "decoupled, recomputed": (recomputed, decoupled, proximal),
    "decoupled, loglinear": (interpolated, decoupled, loglinear),
}

LOGPROB = st.floats(-3, 0)
WEIGHT = st.sampled_from([0.0, 0.5, 1.0, 2.0])
TOKEN = st.builds(
    Token, LOGPROB, LOGPROB, LOGPROB, LOGPROB, st.floats(0, 2), WEIGHT, st.integers(0, 4)
)
RESPONSES = st.lists(
    st.tuples(st.floats(-3, 3), st.lists(TOKEN, min_size=1, max_size=4)), min_size=1, max_size=3
)


def batch(responses, **changes):
    tokens = [t for _, response in responses for t in response]
    columns = {
        **{
            f"{name}_logprobs": [getattr(t, name) for t in tokens]
            for name in ("proximal", "reference")
        },
        **{name: [getattr(t, name) for t in tokens] for name in ("entropy", "staleness")},
        "ids": [i for i, (_, response) in enumerate(responses) for _ in response],
    }
    advantages = [advantage for advantage, response in responses for _ in response]
    own = ([getattr(t, name) for t in tokens] for name in ("new", "generator"))
    return loss_inputs(*own, advantages, **columns | changes)


@pytest.mark.parametrize("case", CASES)
@given(
    responses=RESPONSES,
    low=st.floats(0.05, 0.9),
    high=st.floats(0.05, 2),
    estimator=st.sampled_from(["k1", "k2", "k3"]),
)
def test_value_and_gradient_of_every_token(case, responses, low, high, estimator):
    build, policy_reference, anchor = CASES[case]
    loss, penalties = build(low, high), Penalties(0.3, estimator, entropy_coeff=0.2)
    inputs = batch(responses, **({} if anchor is proximal else {"proximal_logprobs": None}))
    inputs.entropy.requires_grad_(True)
    weights = torch.tensor([t.weight for _, response in responses for t in response], dtype=T)
    found, _ = objective_losses(loss, penalties, inputs, weights)
    found.sum().backward()

    expected, slopes, entropy_slopes = [], [], []
    for advantage, response in responses:
        kept = [t for t in response if t.weight]
        anchors = [anchor(t) for t in kept]
        policy = policy_reference(kept, anchors, advantage, low, high) if kept else ([], [])
        terms = iter(zip(*policy, strict=True))
        for t in response:
            value, slope = next(terms) if t.weight else (0.0, 0.0)
            penalty, pull = kl(estimator, t.new, t.reference) if t.weight else (0.0, 0.0)
            bonus = 0.2 * bool(t.weight)
            expected.append(t.weight * value + 0.3 * penalty - bonus * t.entropy)
            slopes.append(slope + 0.3 * pull)
            entropy_slopes.append(-bonus)
    close(found, expected)
    close(inputs.trainer_logprobs.grad, slopes)
    close(inputs.entropy.grad, entropy_slopes)


@pytest.mark.parametrize(
    ("loss", "ratios", "low", "high"),
    [
        # A = 1: 1.5 is clipped to 1.2. A = -2: 0.5 is clipped to 0.8.
        (GRPOLoss(0.2, 0.2), [1.0, 1.5, 0.5] * 2, [0, 0, 0, 0, 0, 1], [0, 1, 0, 0, 0, 0]),
        # The dual clip of 3 where A = -2.
        (GRPOLoss(dual_clip=3.0), [1, 1, 4, 2, 4, 0.5], [0, 0, 0, 0, 0, 1], [0, 0, 1, 0, 1, 0]),
        # s = 2 where A = 1, and 1/2 where A = -2.
        (GSPOLoss(0.2, 0.2), [1, 2, 4, 1, 0.5, 0.25], [0, 0, 0, 1, 1, 1], [1, 1, 1, 0, 0, 0]),
        (CISPOLoss(0.2, 0.2), [1.0, 1.5, 0.5] * 2, [0, 0, 1, 0, 0, 1], [0, 1, 0, 0, 1, 0]),
        (REINFORCELoss(max_ratio=1.2), [1.0, 1.5, 0.5] * 2, [0] * 6, [0, 1, 0, 0, 1, 0]),
    ],
    ids=["grpo", "grpo, dual clip", "gspo", "cispo", "reinforce"],
)
def test_what_is_clipped_is_counted_and_the_ratios_are_reported(loss, ratios, low, high):
    generator = [-1.0 - math.log(ratio) for ratio in ratios]
    tokens = loss_inputs([-1.0] * 6, generator, [1.0] * 3 + [-2.0] * 3, ids=[0] * 3 + [1] * 3)
    metrics = loss(tokens)[1]
    used = [2.0] * 3 + [0.5] * 3 if isinstance(loss, GSPOLoss) else ratios
    close(metrics["ratio/mean"], used)
    close(metrics["ratio/max"], used)
    assert metrics["ratio/clip_fraction_low"].tolist() == low
    assert metrics["ratio/clip_fraction_high"].tolist() == high
    either = [a or b for a, b in zip(low, high, strict=True)]
    assert metrics["ratio/clip_fraction"].tolist() == either
    assert not any(values.requires_grad for values in metrics.values())
