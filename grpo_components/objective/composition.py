"""Composes the loss of each token: a policy loss times its off-policy weight, plus penalties."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import torch
from torch import Tensor

from grpo_components.objective.component_errors import named_failure
from grpo_components.objective.contracts import checked_losses
from grpo_components.objective.losses import LossInputs, TokenMetrics
from grpo_components.objective.penalties import Penalties

Loss = Callable[[LossInputs], tuple[Tensor, TokenMetrics]]


def has_entropy_gradient(loss: Loss, penalties: Penalties) -> bool:
    """Whether loss or penalties need the entropy with a gradient, which costs memory."""
    return penalties.entropy_coeff > 0 or getattr(loss, "needs_entropy", False)


def objective_losses(
    loss: Loss,
    penalties: Penalties,
    inputs: LossInputs,
    weights: Tensor | None,
    name: str = "the loss",
) -> tuple[Tensor, TokenMetrics]:
    """Compute the loss to minimize for each token: off-policy weight x policy loss + penalties.

    Only this function applies off-policy `weights` (None: no correction) and penalties, whatever
    the loss. A token with weight 0 is masked: loss and penalties get 0 in place of its inputs, and
    its loss and gradient are 0.
    """
    kept = None if weights is None else weights != 0
    tokens = inputs if kept is None else _with_masked_tokens_neutral(inputs, kept)
    with named_failure("loss", name):
        returned = loss(tokens)
    policy, metrics = checked_losses(name, returned, tokens)
    terms, penalty_metrics = penalties(tokens)
    reported = metrics.get("loss/policy", policy).detach()
    total = policy if weights is None else weights * policy
    for term in terms:
        total = total + term
    if weights is not None and kept is not None:
        total = torch.where(kept, total, 0.0)
        reported = torch.where(kept, weights * reported, 0.0)
    return total, {**metrics, **penalty_metrics, "loss/policy": reported}


def _with_masked_tokens_neutral(inputs: LossInputs, kept: Tensor) -> LossInputs:
    # Set to 0 before any arithmetic: masking by a later product would leave 0 * inf = NaN.
    columns = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    neutral = {
        name: torch.where(kept, values, 0.0)
        for name, values in columns.items()
        if isinstance(values, Tensor) and values.is_floating_point()
    }
    return replace(inputs, **neutral, kept=kept)
