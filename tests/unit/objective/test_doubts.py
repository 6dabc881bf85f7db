"""Known mistakes in losses and advantages are named, and none of our own parts has one."""

from dataclasses import replace

import numpy as np
import pytest
from planted_bugs.losses import ClippedWeightInGradient, ClippingOff, RatioIsOne

from grpo_components.config.trial import made_inputs
from grpo_components.objective import advantages as ours
from grpo_components.objective.composition import Penalties
from grpo_components.objective.doubts import (
    doubts_about_advantages,
    doubts_about_loss,
    doubts_about_micro_batches,
    doubts_about_sign,
)
from grpo_components.objective.losses import (
    CISPOLoss,
    DecoupledPPOLoss,
    GRPOLoss,
    GSPOLoss,
    REINFORCELoss,
)

LOSSES = [
    *(GRPOLoss(), GRPOLoss(0.2, 0.28), GRPOLoss(dual_clip=3.0), GSPOLoss(), CISPOLoss()),
    *(CISPOLoss(0.2, 0.2), REINFORCELoss(), REINFORCELoss(2.0), DecoupledPPOLoss()),
    *(DecoupledPPOLoss(proximal="loglinear"), DecoupledPPOLoss(max_weight=None)),
]
PENALTIES = Penalties(kl_coeff=0.1, kl_estimator="k2", entropy_coeff=0.1)


def inputs_of(loss):
    inputs = made_inputs(True, False, 3, step=0)
    if not getattr(loss, "needs_proximal", False):
        return inputs
    return replace(inputs, proximal_logprobs=inputs.trainer_logprobs.detach())


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: type(loss).__name__)
def test_no_loss_of_ours_is_doubted(loss):
    assert list(doubts_about_loss(loss)) == []
    assert list(doubts_about_sign(loss)) == []
    assert list(doubts_about_micro_batches(loss, PENALTIES, inputs_of(loss))) == []


def ratio_of(tokens):
    return (tokens.trainer_logprobs - tokens.anchor_logprobs).exp()


def one_sided(tokens):
    return -ratio_of(tokens).clamp(max=5) * tokens.advantages, {}


def weighted(tokens):
    """Plain REINFORCE with a bounded weight."""
    weight = ratio_of(tokens).detach().clamp(max=2)
    return -weight * tokens.advantages * tokens.trainer_logprobs, {}


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (RatioIsOne(), ["the ratio to the generator changes no gradient"]),
        (ClippedWeightInGradient(), ["has no gradient"]),
        (one_sided, ["ratio to the generator is 1000 and its advantage below 0 has no gradient"]),
        (ClippingOff(), ["the gradient is unbounded"]),
        (weighted, []),
    ],
)
def test_a_known_mistake_is_named(loss, said):
    found = list(doubts_about_loss(loss))
    assert len(found) == len(said)
    assert all(part in line for part, line in zip(said, found, strict=True))


@pytest.mark.parametrize("loss", [GRPOLoss(), CISPOLoss(), DecoupledPPOLoss(), weighted])
def test_a_forgotten_minus_is_named(loss):
    def negated(tokens):
        losses, metrics = loss(tokens)
        return -losses, metrics

    negated.needs_proximal = getattr(loss, "needs_proximal", False)
    (line,) = doubts_about_sign(negated)
    assert "its sign is wrong" in line and not list(doubts_about_sign(loss))


def test_a_loss_that_mixes_responses_is_named():
    def centred(tokens):
        losses = -ratio_of(tokens) * tokens.advantages
        return losses - losses.detach().mean(), {}

    (line,) = doubts_about_micro_batches(centred, PENALTIES, inputs_of(centred))
    assert "depend on the other responses" in line


def test_a_penalty_over_padded_positions_is_named():
    class Padded(Penalties):
        def __call__(self, tokens):
            terms, metrics = super().__call__(tokens)
            counts = tokens.sequence_ids.bincount()
            return [t * counts.sum() / (len(counts) * counts.max()) for t in terms], metrics

    loss = GRPOLoss()
    (line,) = doubts_about_micro_batches(loss, Padded(kl_coeff=0.1), inputs_of(loss))
    assert "over padding" in line


@pytest.mark.parametrize("group_size", [1, 2, 3, 16])
@pytest.mark.parametrize(
    "name",
    [
        *("GroupNormalizedAdvantages", "BatchScaledAdvantages", "GroupCenteredAdvantages"),
        *("LeaveOneOutAdvantages", "BatchNormalizedAdvantages"),
    ],
)
def test_no_advantages_of_ours_are_doubted(name, group_size):
    assert list(doubts_about_advantages(getattr(ours, name)(), group_size)) == []


@pytest.mark.parametrize("group_size", [2, 3, 16])
def test_a_mean_over_prompts_and_a_lost_sign_are_named(group_size):
    def over_prompts(rewards):
        return rewards - rewards.mean(axis=0, keepdims=True)

    def negated(rewards):
        return np.negative(rewards - rewards.mean(axis=1, keepdims=True))

    for wrong in (over_prompts, negated):
        (line,) = doubts_about_advantages(wrong, group_size)
        assert "rewards are [B, G]" in line
