"""Tests a loss and an advantage function for known mistakes that raise no error; pure torch.

Each mistake was made in public code, which trained on silently: see docs/results/museum.md. A
finding is a warning, because a loss may do all of this on purpose.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from grpo_components.objective.composition import Loss, Penalties, objective_losses
from grpo_components.objective.contracts import advantages_of
from grpo_components.objective.losses import LossInputs

_RATIOS = (0.05, 0.5, 1.0, 2.0, 1000.0)
"""Ratios of trainer to generator at which the gradient of a loss is computed."""
_UNBOUNDED = 100.0
"""A gradient is called unbounded if it is this many times larger at the largest ratio than at 1."""
_ALIKE = 1e-5


def doubts_about_loss(loss: Loss) -> Iterator[str]:
    """Yield warnings about a loss, after a test with tokens of an older policy.

    The loss is called with single-token responses, one for each ratio in `_RATIOS`; first all have
    advantage 1, then all have -1.
    """
    better, worse = (_gradients(loss, advantage) for advantage in (1.0, -1.0))
    if all(_same(values) and values[0] != 0 for values in (better, worse)):
        yield (
            "the ratio to the generator changes no gradient, so that tokens of an older policy are "
            "trained like those of the current one, and nothing is clipped"
        )
        return
    first, last = _RATIOS[0], _RATIOS[-1]
    keeps_worse = getattr(loss, "dual_clip", None) is None
    if better[0] == 0 or (keeps_worse and worse[-1] == 0):
        ratio, side = (first, "above") if better[0] == 0 else (last, "below")
        yield (
            f"a token whose ratio to the generator is {ratio:g} and its advantage {side} 0 has no "
            "gradient, so that nothing corrects the policy there: a clipped weight must be "
            "detached, a clipped ratio needs the smaller of two terms"
        )
    on_purpose = getattr(loss, "max_ratio", math.nan) is None
    if abs(better[-1]) > _UNBOUNDED * abs(better[2]) > 0 and not on_purpose:
        yield (
            f"the gradient is unbounded: that of a token with advantage 1 is "
            f"{abs(better[-1] / better[2]):.3g} times as large at ratio {last:g} as at 1"
        )


def doubts_about_sign(loss: Loss) -> Iterator[str]:
    """Yield a warning if a loss trains away from the reward, on tokens of the current policy."""
    at_one = _RATIOS.index(1.0)
    better, worse = (_gradients(loss, advantage)[at_one] for advantage in (1.0, -1.0))
    if better > 0 or worse < 0:
        yield (
            "a token with advantage 1 becomes less likely, or one with -1 likelier, so that the "
            "loss leads away from the reward: its sign is wrong"
        )


def doubts_about_micro_batches(
    loss: Loss, penalties: Penalties, inputs: LossInputs
) -> Iterator[str]:
    """Yield a warning if a response's losses depend on the other responses in its micro-batch."""
    whole, again = (objective_losses(loss, penalties, inputs, None)[0] for _ in range(2))
    if not torch.equal(whole, again):  # it has a state, or draws random numbers
        return
    responses = inputs.sequence_ids
    for response in range(int(responses.max()) + 1):
        alone = objective_losses(loss, penalties, _part(inputs, responses == response), None)[0]
        if not torch.allclose(alone, whole[responses == response], _ALIKE, _ALIKE):
            yield (
                "the losses of a response depend on the other responses of its micro-batch, so "
                "that they change with tokens_per_micro_batch and the number of ranks: means over "
                "the batch, or over padding, belong into `aggregation`"
            )
            return


def doubts_about_advantages(
    advantages: Callable[[NDArray[np.float64]], Any], group_size: int
) -> Iterator[str]:
    """Yield a warning if a group's advantages fall with more reward, or differ at equal reward."""
    if group_size < 2:
        return
    rewards = np.ones((4, group_size))
    rewards[0] = np.arange(group_size) / group_size
    found = advantages_of(advantages, rewards).astype(np.float64)
    for reward, advantage in zip(rewards, found, strict=True):
        order = np.argsort(reward, kind="stable")
        steps, rises = np.diff(advantage[order]), np.diff(reward[order])
        if (steps < -_ALIKE).any() or (np.abs(steps[rises == 0]) > _ALIKE).any():
            yield (
                "responses to one prompt with the same reward get different advantages, or one "
                "with more reward gets less: rewards are [B, G], a row for each prompt"
            )
            return


def _gradients(loss: Loss, advantage: float) -> list[float]:
    """Return the gradient of a token's loss with respect to its logprob, at each of `_RATIOS`."""
    ratios = torch.tensor(_RATIOS, dtype=torch.float32)
    trainer = torch.full_like(ratios, -1.0).requires_grad_()
    generator = trainer.detach() - ratios.log()
    wants_anchor = getattr(loss, "needs_proximal", False)
    inputs = LossInputs(
        trainer_logprobs=trainer,
        generator_logprobs=generator,
        advantages=torch.full_like(ratios, advantage),
        sequence_ids=torch.arange(len(ratios)),
        staleness=torch.ones(len(ratios), dtype=torch.int64),
        step=0,
        reference_logprobs=trainer.detach(),
        teacher_logprobs=trainer.detach(),
        proximal_logprobs=generator if wants_anchor else None,
        entropy=torch.ones_like(ratios).requires_grad_(),
    )
    losses, _ = loss(inputs)
    (gradient,) = torch.autograd.grad(losses.sum(), trainer)
    return [float(value) for value in gradient]


def _same(values: list[float]) -> bool:
    return all(math.isclose(value, values[0], rel_tol=_ALIKE) for value in values)


def _part(inputs: LossInputs, kept: Tensor) -> LossInputs:
    """Select the tokens of one response by the mask `kept` [N], as a micro-batch of its own."""
    part = {name: each[kept] for name, each in vars(inputs).items() if isinstance(each, Tensor)}
    return replace(inputs, **part | {"sequence_ids": torch.zeros_like(part["sequence_ids"])})
