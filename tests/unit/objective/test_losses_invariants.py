"""What all policy objectives share: masking, gradient on-policy, settings, what they need."""

import itertools
import math
import pickle
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
from grpo_components.objective.penalties import Penalties

LOSSES = {
    "grpo": GRPOLoss,
    "gspo": GSPOLoss,
    "cispo": CISPOLoss,
    "reinforce": REINFORCELoss,
    "decoupled, recomputed": DecoupledPPOLoss,
    "decoupled, loglinear": lambda **settings: DecoupledPPOLoss(proximal="loglinear", **settings),
}
every_loss = pytest.mark.parametrize("name", LOSSES)
FIELDS = (
    "trainer_logprobs",
    "generator_logprobs",
    "reference_logprobs",
    "proximal_logprobs",
    "entropy",
)
IDS = torch.tensor([0, 0, 0, 1, 1, 1, 1])
N = len(IDS)


def random_inputs(seed, dtype=torch.float64, **changes):
    generator = torch.Generator().manual_seed(seed)
    draw = {
        key: -2 * torch.rand(N, generator=generator, dtype=torch.float64).to(dtype)
        for key in FIELDS
    }
    draw["trainer_logprobs"].requires_grad_(True)
    inputs = LossInputs(
        advantages=torch.randn(2, generator=generator, dtype=torch.float64).to(dtype)[IDS],
        sequence_ids=IDS,
        staleness=torch.arange(N) % 3,
        step=0,
        **draw,
    )
    return replace(inputs, **changes)


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


@every_loss
@given(seed=st.integers(0, 999))
def test_on_policy_every_objective_has_the_gradient_of_reinforce(name, seed):
    inputs = random_inputs(seed)
    same = inputs.trainer_logprobs.detach()
    inputs = replace(inputs, generator_logprobs=same, proximal_logprobs=same)
    torch.testing.assert_close(gradient(LOSSES[name](), inputs), -inputs.advantages)


@pytest.mark.parametrize("kind", [GRPOLoss, GSPOLoss, DecoupledPPOLoss])
def test_an_overflowing_ratio_that_is_clipped_leaves_finite_gradients(kind):
    far = torch.full((N,), -200.0)  # exp(200) is infinite in float32
    inputs = random_inputs(0, torch.float32, generator_logprobs=far, proximal_logprobs=far)
    inputs = replace(inputs, advantages=torch.ones(N))
    assert torch.isfinite(kind()(inputs)[0]).all()
    assert (gradient(kind(), inputs) == 0).all()


@every_loss
def test_without_a_penalty_or_bonus_neither_reference_nor_entropy_is_needed(name):
    assert (NONE.needs_reference, NONE.entropy_coeff) == (False, 0)
    inputs = random_inputs(0, reference_logprobs=None, entropy=None)
    losses, metrics = objective_losses(LOSSES[name](), NONE, inputs, None)
    assert losses.shape == (N,)
    assert "loss/kl_reference" not in metrics


def test_what_is_needed_and_missing_is_an_error():
    assert BOTH.needs_reference
    for missing in ("reference_logprobs", "entropy"):
        with pytest.raises(AssertionError, match="without"):
            BOTH(random_inputs(0, **{missing: None}))


def test_only_the_recomputed_proximal_policy_is_asked_for():
    needed = {name for name, kind in LOSSES.items() if kind().needs_proximal}
    assert needed == {"decoupled, recomputed"}
    with pytest.raises(AssertionError, match="recomputed"):
        DecoupledPPOLoss()(random_inputs(0, proximal_logprobs=None))


@every_loss
def test_a_reference_without_a_penalty_is_measured_and_changes_nothing(name):
    inputs = random_inputs(0)
    losses, metrics = objective_losses(LOSSES[name](), NONE, inputs, None)
    assert (metrics["loss/kl_reference"] >= 0).all() and "loss/penalty" not in metrics
    torch.testing.assert_close(losses, metrics["loss/policy"], rtol=0, atol=0)


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


@pytest.mark.parametrize("kind", [GRPOLoss, GSPOLoss, CISPOLoss, DecoupledPPOLoss])
def test_the_clip_follows_its_schedule(kind):
    ramp = {"schedule": "linear", "start": 0.9, "end": 0.1, "num_steps": 8}
    scheduled = kind(clip_low=ramp, clip_high=ramp)
    for step, clip in ((0, 0.9), (4, 0.5), (8, 0.1)):
        inputs = random_inputs(5, step=step)
        torch.testing.assert_close(scheduled(inputs)[0], kind(clip, clip)(inputs)[0])


@every_loss
def test_a_loss_reaches_the_trainer_by_value(name):
    loss = LOSSES[name]()
    inputs = random_inputs(1)
    copy = pickle.loads(pickle.dumps(loss))
    torch.testing.assert_close(copy(inputs)[0], loss(inputs)[0], rtol=0, atol=0)


BAD = [
    *itertools.product(
        [GRPOLoss, GSPOLoss, CISPOLoss, DecoupledPPOLoss],
        [{"clip_low": 0}, {"clip_low": 1.5}, {"clip_high": 0}, {"clip_high": "wide"}],
    ),
    *itertools.product(
        [Penalties],
        [{"kl_coeff": -1}, {"kl_estimator": "k4"}, {"entropy_coeff": -0.1}],
    ),
    (REINFORCELoss, {"max_ratio": 0}),
    (DecoupledPPOLoss, {"max_weight": 0}),
    *itertools.product(
        [GRPOLoss, GSPOLoss, DecoupledPPOLoss],
        [{"dual_clip": bad} for bad in (1, 0.5, -3, math.inf, math.nan, True, "3")],
    ),
    (DecoupledPPOLoss, {"proximal": "guessed"}),
]


@pytest.mark.parametrize(("kind", "bad"), BAD)
def test_settings_out_of_range_name_their_key(kind, bad):
    with pytest.raises(ValueError, match=rf"loss\.{next(iter(bad))}.*allowed"):
        kind(**bad)
