"""The loss of each token: policy loss times off-policy weight, plus KL and entropy penalties."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from grpo_components.objective.component_errors import named_failure
from grpo_components.objective.contracts import checked_losses
from grpo_components.objective.kl import ESTIMATORS
from grpo_components.objective.losses import LossInputs, TokenMetrics
from grpo_components.schedules import Scheduled, as_schedule

Loss = Callable[[LossInputs], tuple[Tensor, TokenMetrics]]


class Penalties:
    """Computes each token's penalty: kl_coeff k(trainer, reference) - entropy_coeff entropy.

    k is the KL estimator; KL in the loss: DeepSeekMath, arXiv 2402.03300, eq. 3 and 4 (k3).

    Args:
        kl_coeff: weight of the KL, a number or a schedule; 0 disables it and needs no reference.
        kl_estimator: k1, k2 or k3, see `kl.py`.
        entropy_coeff: weight of the entropy bonus; 0 disables it.
    """

    def __init__(
        self,
        kl_coeff: Scheduled = 0.0,
        kl_estimator: str = "k3",
        entropy_coeff: float = 0.0,
    ) -> None:
        self.kl_coeff = as_schedule("loss.kl_coeff", kl_coeff)
        self.needs_reference = self.kl_coeff.highest > 0
        """Whether the KL coefficient is above 0 at any step."""
        self.entropy_coeff = entropy_coeff
        self._estimate = ESTIMATORS[kl_estimator]

    def __call__(self, tokens: LossInputs) -> tuple[list[Tensor], TokenMetrics]:
        """Return the penalty terms [N] with a coefficient above 0, and metrics [N] by name."""
        terms: list[Tensor] = []
        metrics: TokenMetrics = {}
        if tokens.reference_logprobs is None:
            assert not self.needs_reference, "kl_coeff > 0 without reference logprobs"
        else:
            kl = self._estimate(tokens.trainer_logprobs, tokens.reference_logprobs)
            metrics["loss/kl_reference"] = kl.detach()
            coefficient = self.kl_coeff(tokens.step)
            if coefficient > 0:  # 0 times the gradient of an overflow is NaN
                terms.append(coefficient * kl)
        if self.entropy_coeff > 0:
            assert tokens.entropy is not None, "entropy_coeff > 0 without entropy"
            terms.append(-self.entropy_coeff * tokens.entropy)
        if terms:
            metrics["loss/penalty"] = sum(terms[1:], terms[0]).detach()
        return terms, metrics


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
    neutral = {
        name: torch.where(kept, values, 0.0)
        for name, values in vars(inputs).items()
        if isinstance(values, Tensor) and values.is_floating_point()
    }
    return replace(inputs, **neutral, kept=kept)
