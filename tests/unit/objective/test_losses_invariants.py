"""What all policy objectives share: masking, the dual clip, no NaN, settings, what they need."""

import itertools
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lib.loss_inputs import evaluated, loss_inputs

from grpo_components.objective.composition import Penalties, objective_losses
from grpo_components.objective.losses import (
    CISPOLoss,
    DecoupledPPOLoss,
    GRPOLoss,
    GSPOLoss,
    REINFORCELoss,
)

T = torch.float64
LOSSES = {
    "grpo": GRPOLoss,
    "grpo, dual clip": partial(GRPOLoss, dual_clip=3.0),
    "gspo": GSPOLoss,
    "cispo": CISPOLoss,
    "reinforce": REINFORCELoss,
    "reinforce, bounded": partial(REINFORCELoss, max_ratio=2.0),
    "decoupled": DecoupledPPOLoss,
    "decoupled, unbounded": partial(DecoupledPPOLoss, max_weight=None),
    "decoupled, loglinear": partial(DecoupledPPOLoss, max_weight=None, proximal="loglinear"),
}
every_loss = pytest.mark.parametrize("name", LOSSES)
DUAL_CLIPPED = [GRPOLoss, GSPOLoss, DecoupledPPOLoss]
CLIPPED = [*DUAL_CLIPPED, CISPOLoss]
with_dual_clip = pytest.mark.parametrize("kind", DUAL_CLIPPED)
OTHERS = ("reference_logprobs", "proximal_logprobs", "entropy")
FIELDS = ("trainer_logprobs", "generator_logprobs", *OTHERS)
IDS = torch.tensor([0, 0, 0, 1, 1, 1, 1])
N = len(IDS)


def random_inputs(seed, dtype=T, **changes):
    generator = torch.Generator().manual_seed(seed)
    draws = [(-2 * torch.rand(N, generator=generator, dtype=T)).to(dtype) for _ in FIELDS]
    advantages = torch.randn(2, generator=generator, dtype=T).to(dtype)[IDS]
    others = dict(zip(OTHERS, draws[2:], strict=True))
    staleness = torch.arange(N) % 3
    inputs = loss_inputs(*draws[:2], advantages, ids=IDS, staleness=staleness, **others)
    return replace(inputs, **changes)


def tokens(trainer, generator, advantages, ids=None, dtype=T, proximal=None):
    """Tokens of several ages, each its own response unless `ids` says otherwise."""
    size = len(trainer)
    own = {"ids": range(size) if ids is None else ids, "staleness": [n % 4 for n in range(size)]}
    proximal = generator if proximal is None else proximal
    inputs = (trainer, generator, advantages)
    return loss_inputs(*inputs, dtype=dtype, proximal_logprobs=proximal, **own)


NONE, BOTH = Penalties(), Penalties(kl_coeff=0.3, entropy_coeff=0.2)


def gradient(loss, inputs, weights=None, penalties=NONE):
    losses, _ = objective_losses(loss, penalties, inputs, weights)
    (found,) = torch.autograd.grad(losses.sum(), inputs.trainer_logprobs)
    return found


@every_loss
@given(
    seed=st.integers(0, 999),
    kept=st.lists(st.booleans(), min_size=N, max_size=N),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    data=st.data(),
)
def test_a_masked_token_has_no_loss_and_no_gradient_whatever_its_numbers(
    name, seed, kept, dtype, data
):
    loss = LOSSES[name]()
    mask = torch.tensor(kept)
    clean, weights = random_inputs(seed, dtype), mask.to(dtype)
    wild = {}
    for field in FIELDS:
        value = data.draw(st.sampled_from([math.inf, -math.inf, -1.0, math.nan]))
        wild[field] = torch.where(mask, getattr(clean, field).detach(), value)
        wild[field].requires_grad_(field in ("trainer_logprobs", "entropy"))
    losses, metrics = objective_losses(loss, BOTH, replace(clean, **wild), weights)
    losses.sum().backward()
    for found in (losses, wild["trainer_logprobs"].grad, wild["entropy"].grad, *metrics.values()):
        assert torch.isfinite(found).all()
        assert found.shape == (N,)
    assert (losses[~mask] == 0).all()
    assert (wild["trainer_logprobs"].grad[~mask] == 0).all()
    assert (wild["entropy"].grad[~mask] == 0).all()
    assert (metrics["loss/policy"][~mask] == 0).all()
    assert (metrics["ratio/max"][~mask] == 1).all() or name == "gspo"
    # And its siblings do not see it.
    alone, _ = objective_losses(loss, BOTH, clean, weights)
    torch.testing.assert_close(losses, alone, rtol=0, atol=0)
    expected = gradient(loss, clean, weights, BOTH)
    torch.testing.assert_close(wild["trainer_logprobs"].grad, expected, rtol=0, atol=0)


@with_dual_clip
def test_an_overflowing_ratio_that_is_clipped_leaves_finite_gradients(kind):
    far = torch.full((N,), -200.0)  # exp(200) is infinite in float32
    inputs = random_inputs(0, torch.float32, generator_logprobs=far, proximal_logprobs=far)
    inputs = replace(inputs, advantages=torch.ones(N))
    assert torch.isfinite(kind()(inputs)[0]).all()
    assert (gradient(kind(), inputs) == 0).all()


@every_loss
def test_without_a_penalty_or_bonus_a_reference_is_measured_if_given_and_changes_nothing(name):
    assert (NONE.needs_reference, NONE.entropy_coeff) == (False, 0)
    without = random_inputs(0, reference_logprobs=None, entropy=None)
    expected, metrics = objective_losses(LOSSES[name](), NONE, without, None)
    assert "loss/kl_reference" not in metrics
    losses, metrics = objective_losses(LOSSES[name](), NONE, random_inputs(0), None)
    assert (metrics["loss/kl_reference"] >= 0).all() and "loss/penalty" not in metrics
    for found in (expected, metrics["loss/policy"]):
        torch.testing.assert_close(losses, found, rtol=0, atol=0)


def test_only_the_recomputed_proximal_policy_is_asked_for():
    needed = {name for name, kind in LOSSES.items() if getattr(kind(), "needs_proximal", False)}
    assert needed == {"decoupled", "decoupled, unbounded"}
    with pytest.raises(AssertionError, match="recomputed"):
        DecoupledPPOLoss()(random_inputs(0, proximal_logprobs=None))


@every_loss
def test_where_the_penalty_is_at_zero_an_overflowing_one_leaves_finite_gradients(name):
    off_at_first = {"schedule": "linear", "start": 0.0, "end": 0.5, "num_steps": 10}
    inputs = random_inputs(0, torch.float32, reference_logprobs=torch.full((N,), 200.0))
    assert torch.isinf(NONE(inputs)[1]["loss/kl_reference"]).all()
    for coefficient in (0.0, off_at_first):
        found = gradient(LOSSES[name](), inputs, penalties=Penalties(coefficient))
        assert torch.isfinite(found).all()


@every_loss
def test_the_penalty_follows_its_schedule(name):
    ramp = {"schedule": "linear", "start": 0.0, "end": 0.5, "num_steps": 10}
    penalties = Penalties(kl_coeff=ramp)
    assert penalties.needs_reference
    for step, coefficient in ((0, 0.0), (4, 0.2), (10, 0.5), (99, 0.5)):
        inputs = random_inputs(3, step=step)
        losses, metrics = objective_losses(LOSSES[name](), penalties, inputs, None)
        expected = metrics["loss/policy"] + coefficient * metrics["loss/kl_reference"]
        torch.testing.assert_close(losses.detach(), expected)


@pytest.mark.parametrize("kind", CLIPPED)
def test_the_clip_follows_its_schedule(kind):
    ramp = {"schedule": "linear", "start": 0.9, "end": 0.1, "num_steps": 8}
    scheduled = kind(clip_low=ramp, clip_high=ramp)
    for step, clip in ((0, 0.9), (4, 0.5), (8, 0.1)):
        inputs = random_inputs(5, step=step)
        torch.testing.assert_close(scheduled(inputs)[0], kind(clip, clip)(inputs)[0])


BAD = [
    *itertools.product(CLIPPED, [{"clip_low": 0}, {"clip_low": 1.5}, {"clip_high": 0}]),
    *itertools.product(DUAL_CLIPPED, [{"dual_clip": 1}]),
    (GRPOLoss, {"dual_clip": math.nan}),
    (REINFORCELoss, {"max_ratio": 0}),
    (DecoupledPPOLoss, {"max_weight": 0}),
    (DecoupledPPOLoss, {"proximal": "guessed"}),
]


@pytest.mark.parametrize(("kind", "bad"), BAD)
def test_settings_out_of_range_name_their_key(kind, bad):
    with pytest.raises(ValueError, match=rf"loss\.{next(iter(bad))}.*allowed"):
        kind(**bad)


# ---- dual clip ----------------------------------------------------------------------------------


def ye(ratio, advantages, low, high, dual):
    """Ye et al. 2020, eq. 5, as it stands there, for A < 0; PPO's objective elsewhere."""
    plain = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    return -torch.where(advantages < 0, torch.maximum(plain, dual * advantages), plain)


CASES = st.lists(st.tuples(st.floats(-3, 3), st.floats(-2, 2)), min_size=1, max_size=8)


@with_dual_clip
@given(CASES, st.floats(0.05, 0.9), st.floats(0.05, 2), st.floats(1.01, 5))
def test_the_dual_clip_is_the_papers_equation_value_and_gradient(kind, cases, low, high, dual):
    gaps, advantages = zip(*cases, strict=True)
    for gap in gaps:  # on a bound itself the last bit decides
        if min(abs(math.exp(gap) - bound) for bound in (1 - low, 1 + high, dual)) < 1e-9:
            return
    generator = [-1.0 - gap for gap in gaps]
    inputs = tokens([-1.0] * len(gaps), generator, advantages)
    losses, gradient, _ = evaluated(kind(low, high, dual_clip=dual), inputs)
    trainer = inputs.trainer_logprobs.detach().requires_grad_(True)
    ratio = (trainer - inputs.generator_logprobs).exp()
    expected = ye(ratio, inputs.advantages, 1 - low, 1 + high, dual)
    (slope,) = torch.autograd.grad(expected.sum(), trainer)
    torch.testing.assert_close(losses, expected.detach(), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(gradient, slope, rtol=1e-12, atol=1e-14)


@with_dual_clip
def test_an_overflowing_ratio_of_a_negative_advantage_is_bounded_by_the_dual_clip(kind):
    inputs = tokens([0.0, -1.0], [-200.0, -1.0], [-2.0, -2.0], dtype=torch.float32)
    losses, gradient, _ = evaluated(kind(dual_clip=3.0), inputs)
    assert losses.tolist() == [6.0, 2.0] and gradient.tolist() == [0.0, 2.0]


# ---- no NaN -------------------------------------------------------------------------------------


@every_loss
@given(
    gap=st.sampled_from([88.5, 89.0, 200.0, 800.0, 1e4, -89.0, -800.0, -1e4]),
    dtype=st.sampled_from([torch.float32, T]),
    together=st.booleans(),
)
def test_a_token_of_advantage_zero_has_no_loss_and_no_gradient_whatever_its_ratio(
    name, gap, dtype, together
):
    loss = LOSSES[name]()
    # Far on either side: towards the generator, and towards the proximal policy.
    for trainer, generator, proximal in (
        (-1.0, -1.0 - gap, -1.0 - gap),
        (-1.0, -1.0 - gap, -1.0),
        (-1.0, -1.0, -1.0 - gap),
    ):
        ids = [0, 0, 1] if together else [0, 1, 2]
        own = [trainer, -2.0, -1.0], [generator, -2.0, -1.5], [0.0, 0.0, 0.5]
        inputs = tokens(*own, ids, dtype, [proximal, -2.0, -1.2])
        losses, gradient, metrics = evaluated(loss, inputs)
        assert losses[:2].tolist() == [0, 0] and gradient[:2].tolist() == [0, 0]
        assert torch.isfinite(losses[2]) and torch.isfinite(gradient[2])
        assert not any(values.isnan().any() for values in metrics.values())


@pytest.mark.parametrize("dtype", [torch.float32, T])
@pytest.mark.parametrize("far", [150.0, 740.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_vanishing_weight_times_an_overflowing_ratio_is_their_product(dtype, far, advantage):
    """Trainer and generator agree, and the proximal policy is far from both."""
    for proximal in (-1.0 - far, -1.0 + far):
        inputs = tokens([-1.0], [-1.5], [advantage], dtype=dtype, proximal=[proximal])
        losses, gradient, _ = evaluated(DecoupledPPOLoss(max_weight=None), inputs)
        assert not losses.isnan().any() and not gradient.isnan().any()
        unclipped = (proximal < -1.0) == (advantage < 0)
        if unclipped:  # w rho = pi_trainer / pi_generator
            expected = -advantage * math.exp(0.5)
            assert losses.item() == pytest.approx(expected, rel=1e-4)
            assert gradient.item() == pytest.approx(expected, rel=1e-4)
