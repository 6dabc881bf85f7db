"""Dual clip against the equations of paper and TRL; no overflow of a ratio becomes a NaN."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_components.objective.composition import objective_losses
from grpo_components.objective.losses import (
    CISPOLoss,
    DecoupledPPOLoss,
    GRPOLoss,
    GSPOLoss,
    LossInputs,
    REINFORCELoss,
)
from grpo_components.objective.off_policy import (
    GeometricMask,
    MaskedIS,
    NoCorrection,
    SequenceTIS,
    TokenTIS,
)
from grpo_components.objective.penalties import Penalties

T = torch.float64
LOSSES = {
    "grpo": GRPOLoss,
    "grpo, dual clip": lambda **settings: GRPOLoss(dual_clip=3.0, **settings),
    "gspo": GSPOLoss,
    "cispo": CISPOLoss,
    "reinforce": REINFORCELoss,
    "reinforce, bounded": lambda **settings: REINFORCELoss(max_ratio=2.0, **settings),
    "decoupled": DecoupledPPOLoss,
    "decoupled, unbounded": lambda **settings: DecoupledPPOLoss(max_weight=None, **settings),
    "decoupled, loglinear": lambda **settings: DecoupledPPOLoss(
        max_weight=None, proximal="loglinear", **settings
    ),
}
every_loss = pytest.mark.parametrize("name", LOSSES)


def tokens(trainer, generator, advantages, ids=None, dtype=T, proximal=None, **given):
    """LossInputs from lists; each token its own response unless `ids` says otherwise."""
    size = len(trainer)
    return LossInputs(
        trainer_logprobs=torch.tensor(trainer, dtype=dtype, requires_grad=True),
        generator_logprobs=torch.tensor(generator, dtype=dtype),
        proximal_logprobs=torch.tensor(generator if proximal is None else proximal, dtype=dtype),
        advantages=torch.tensor(advantages, dtype=dtype),
        sequence_ids=torch.arange(size) if ids is None else torch.tensor(ids),
        staleness=torch.arange(size) % 4,
        step=0,
        **given,
    )


def evaluate(loss, inputs):
    losses, metrics = loss(inputs)
    (gradient,) = torch.autograd.grad(losses.sum(), inputs.trainer_logprobs)
    return losses.detach(), gradient, metrics


# ---- dual clip ----------------------------------------------------------------------------------


def ye(ratio, advantages, low, high, dual):
    """Ye et al. 2020, eq. 5, as it stands there, for A < 0; PPO's objective elsewhere."""
    plain = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    return -torch.where(advantages < 0, torch.maximum(plain, dual * advantages), plain)


def trl(ratio, advantages, low, high, delta):
    """TRL 1.16's two-sided clipping: the first of the two ratios is capped at delta."""
    return -torch.minimum(ratio.clamp(max=delta) * advantages, ratio.clamp(low, high) * advantages)


CASES = st.lists(st.tuples(st.floats(-3, 3), st.floats(-2, 2)), min_size=1, max_size=8)


@pytest.mark.parametrize("kind", [GRPOLoss, GSPOLoss, DecoupledPPOLoss])
@given(CASES, st.floats(0.05, 0.9), st.floats(0.05, 2), st.floats(1.01, 5))
def test_the_dual_clip_is_the_papers_equation_value_and_gradient(kind, cases, low, high, dual):
    gaps, advantages = zip(*cases, strict=True)
    for gap in gaps:  # on a bound itself the last bit decides
        if min(abs(math.exp(gap) - bound) for bound in (1 - low, 1 + high, dual)) < 1e-9:
            return
    generator = [-1.0 - gap for gap in gaps]
    inputs = tokens([-1.0] * len(gaps), generator, advantages)
    losses, gradient, _ = evaluate(kind(low, high, dual_clip=dual), inputs)
    trainer = inputs.trainer_logprobs.detach().requires_grad_(True)
    ratio = (trainer - inputs.generator_logprobs).exp()
    formulas = [ye] if dual < 1 + high else [ye, trl]
    for formula in formulas:
        expected = formula(ratio, inputs.advantages, 1 - low, 1 + high, dual)
        (slope,) = torch.autograd.grad(expected.sum(), trainer, retain_graph=True)
        torch.testing.assert_close(losses, expected.detach(), rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(gradient, slope, rtol=1e-12, atol=1e-14)


def test_the_dual_clip_of_decoupled_ppo_bounds_the_ratio_and_leaves_the_weight():
    # trainer / proximal = 4, cut to 3; proximal / generator = 2.
    inputs = tokens([0.0], [-math.log(8)], [-1.0], proximal=[-math.log(4)])
    losses, gradient, _ = evaluate(DecoupledPPOLoss(dual_clip=3.0), inputs)
    assert (losses.item(), gradient.item()) == (pytest.approx(6.0), 0.0)


@pytest.mark.parametrize("kind", [GRPOLoss, GSPOLoss, DecoupledPPOLoss])
def test_an_overflowing_ratio_of_a_negative_advantage_is_bounded_by_the_dual_clip(kind):
    inputs = tokens([0.0, -1.0], [-200.0, -1.0], [-2.0, -2.0], dtype=torch.float32)
    losses, gradient, _ = evaluate(kind(dual_clip=3.0), inputs)
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
        inputs = tokens([trainer, -2.0, -1.0], [generator, -2.0, -1.5], [0.0, 0.0, 0.5], ids, dtype)
        inputs = replace(
            inputs, proximal_logprobs=torch.tensor([proximal, -2.0, -1.2], dtype=dtype)
        )
        losses, gradient, metrics = evaluate(loss, inputs)
        assert losses[:2].tolist() == [0, 0] and gradient[:2].tolist() == [0, 0]
        assert torch.isfinite(losses[2]) and torch.isfinite(gradient[2])
        assert not any(values.isnan().any() for values in metrics.values())


@every_loss
def test_with_a_penalty_the_advantage_zero_leaves_only_the_penalty(name):
    inputs = tokens([-1.0], [-201.0], [0.0], dtype=torch.float32)
    inputs = replace(inputs, reference_logprobs=torch.tensor([-1.5]))
    inputs.trainer_logprobs.requires_grad_(True)
    losses, _ = objective_losses(LOSSES[name](), Penalties(kl_coeff=0.5), inputs, None)
    (gradient,) = torch.autograd.grad(losses.sum(), inputs.trainer_logprobs)
    assert losses.item() == pytest.approx(0.5 * (math.exp(-0.5) - 1 + 0.5), rel=1e-5)
    assert gradient.item() == pytest.approx(0.5 * (1 - math.exp(-0.5)), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, T])
@pytest.mark.parametrize("far", [150.0, 740.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_vanishing_weight_times_an_overflowing_ratio_is_their_product(dtype, far, advantage):
    """Trainer and generator agree, and the proximal policy is far from both."""
    for proximal in (-1.0 - far, -1.0 + far):
        inputs = tokens([-1.0], [-1.5], [advantage], dtype=dtype, proximal=[proximal])
        losses, gradient, _ = evaluate(DecoupledPPOLoss(max_weight=None), inputs)
        assert not losses.isnan().any() and not gradient.isnan().any()
        unclipped = (proximal < -1.0) == (advantage < 0)
        if unclipped:  # w rho = pi_trainer / pi_generator
            expected = -advantage * math.exp(0.5)
            assert losses.item() == pytest.approx(expected, rel=1e-4)
            assert gradient.item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    "correction",
    [
        NoCorrection(),
        TokenTIS(),
        SequenceTIS(),
        MaskedIS(),
        MaskedIS(level="sequence"),
        GeometricMask(),
    ],
)
@every_loss
@pytest.mark.parametrize("gap", [89.0, 1e4, -89.0, -1e4])
def test_no_correction_brings_a_nan_to_a_token_of_advantage_zero(correction, name, gap):
    inputs = tokens([-1.0, -1.0], [-1.0 - gap, -1.0], [0.0, 0.0], [0, 0], torch.float32)
    log_ratios = inputs.trainer_logprobs.detach() - inputs.generator_logprobs
    weights = correction(log_ratios, inputs.sequence_ids)
    assert torch.isfinite(weights).all()
    losses = LOSSES[name]()(inputs)[0] * weights
    (gradient,) = torch.autograd.grad(losses.sum(), inputs.trainer_logprobs)
    assert (losses == 0).all() and (gradient == 0).all()
