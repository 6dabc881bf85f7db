"""The off-policy correction's weights on what a loss returns, whichever loss it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from grpo_components.objective.component_errors import named_failure
from grpo_components.objective.contracts import checked_losses
from grpo_components.objective.losses import LossInputs, TokenMetrics

Loss = Callable[[LossInputs], tuple[Tensor, TokenMetrics]]


def corrected_losses(
    loss: Loss, inputs: LossInputs, weights: Tensor | None, name: str = "the loss"
) -> tuple[Tensor, TokenMetrics]:
    """Losses of a micro-batch's tokens, each times its weight: the only place that weighs them.

    With l and p what the loss returns for a token, and as its metric `loss/penalty` (0 where it has
    none), the token's loss is w (l - p) + p. A penalty is what no correction concerns, such as the
    KL to the reference and an entropy bonus. A token with weight 0 is masked wholly: the loss gets
    0 for each of its numbers, and whatever it makes of them, loss and gradient are 0.

    Args:
        loss: maps [N] tokens to [N] losses and metrics.
        inputs: of the N tokens.
        weights: [N] finite numbers >= 0, without gradient; None is 1 for each.
        name: of the loss, for errors.

    Returns:
        The losses [N], and the loss's metrics [N] with `loss/policy`, what w (l - p) is.

    Raises:
        ComponentError: the loss does not return what it has to.
    """
    kept = None if weights is None else weights != 0
    tokens = inputs if kept is None else _with_masked_tokens_neutral(inputs, kept)
    with named_failure("loss", name):
        returned = loss(tokens)
    losses, metrics = checked_losses(name, returned, tokens)
    penalty = metrics.get("loss/penalty")
    policy = losses if penalty is None else losses - penalty
    reported = metrics.get("loss/policy", policy).detach()
    if weights is not None and kept is not None:
        losses = weights * policy if penalty is None else weights * policy + penalty
        losses = torch.where(kept, losses, 0.0)
        reported = torch.where(kept, weights * reported, 0.0)
    return losses, {**metrics, "loss/policy": reported}


def _with_masked_tokens_neutral(inputs: LossInputs, kept: Tensor) -> LossInputs:
    # Before any arithmetic: an infinity that only a later product masks leaves 0 * inf = NaN.
    def neutral(values: Tensor | None) -> Tensor | None:
        return None if values is None else torch.where(kept, values, 0.0)

    return replace(
        inputs,
        trainer_logprobs=neutral(inputs.trainer_logprobs),
        generator_logprobs=neutral(inputs.generator_logprobs),
        advantages=neutral(inputs.advantages),
        reference_logprobs=neutral(inputs.reference_logprobs),
        proximal_logprobs=neutral(inputs.proximal_logprobs),
        entropy=neutral(inputs.entropy),
        kept=kept,
    )
