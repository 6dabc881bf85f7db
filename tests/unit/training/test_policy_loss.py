"""Compiling the policy loss, and the teacher's term in it."""

import cloudpickle
import pytest
import torch
from lib.loss_inputs import loss_inputs, recipe_loss

from grpo_components.objective.composition import Penalties
from grpo_components.objective.losses import at_step
from grpo_components.objective.off_policy import NoCorrection, OffPolicySequenceMask
from grpo_components.training.policy_loss import PolicyLoss

LOSS_WITH_HELPER = """
import torch
def ratio(tokens):
    return torch.exp(tokens.trainer_logprobs - tokens.generator_logprobs)
def loss(tokens, clip_low, clip_high):
    return -ratio(tokens) * tokens.advantages, {"ratio/mean": ratio(tokens).detach()}
"""


def helper_loss():
    names = {"__name__": "__main__"}
    exec(LOSS_WITH_HELPER, names)
    return names["loss"]


@pytest.mark.parametrize("make_loss", [recipe_loss, helper_loss])
def test_a_loss_that_came_by_value_compiles_to_the_same_numbers(make_loss):
    """As the trainers get a recipe's own loss, which no module of theirs holds."""
    sent = cloudpickle.dumps(at_step(make_loss(), {"clip_low": 0.2, "clip_high": 0.2}))
    torch.manual_seed(0)
    tokens = loss_inputs(-torch.rand(9), -torch.rand(9), torch.randn(9), ids=[0] * 9)
    (plain, plain_metrics, _), (compiled, compiled_metrics, _) = (
        PolicyLoss(cloudpickle.loads(sent), Penalties(), NoCorrection(), compile_loss=compiles)(
            tokens, tokens.trainer_logprobs
        )
        for compiles in (False, True)
    )
    torch.testing.assert_close(compiled, plain)
    torch.testing.assert_close(compiled_metrics, plain_metrics)


def test_the_teachers_term_is_in_the_advantages_of_loss_and_correction():
    """The second response is far from the generator: masked, since the teacher blames it."""
    trainer = torch.tensor([-1.0, -1.0, -3.0], requires_grad=True)
    given = [-1.0, -1.0, -1.0], [0.0, 0.0, 0.5]
    teacher = {"ids": [0, 0, 1], "teacher_logprobs": [-2.0, -0.5, -4.0]}
    tokens = loss_inputs(trainer, *given, dtype=torch.float32, **teacher)
    parts = (at_step(recipe_loss(), {"clip_low": 0.2, "clip_high": 0.2}), Penalties())
    distilled = PolicyLoss(*parts, OffPolicySequenceMask(), teacher_coeff=2.0, compile_loss=False)
    losses, metrics, weights = distilled(tokens, trainer.detach())
    torch.testing.assert_close(losses.detach(), torch.tensor([2.0, -1.0, 0.0]))
    assert weights is not None and weights.tolist() == [1, 1, 0]
    assert metrics["teacher/kl"].tolist() == [1.0, -0.5, 1.0]
