"""KL to the reference and entropy bonus, added to any policy loss."""

from __future__ import annotations

from torch import Tensor

from grpo_components.objective.kl import ESTIMATORS
from grpo_components.objective.losses import LossInputs, TokenMetrics
from grpo_components.schedules import Scheduled, as_schedule


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
