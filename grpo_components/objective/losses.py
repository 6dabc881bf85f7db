"""Policy objectives: one loss per token, from logprobs and advantages; pure torch."""

from __future__ import annotations

import torch
from torch import Tensor

TokenMetrics = dict[str, Tensor]
"""Values [N] by metric key; logged is their mean, or their maximum where a key ends in `max`."""


class GRPOLoss:
    """Clipped objective with the true ratio to the generator, plus a k3 penalty to the reference.

    rho = exp(log pi_trainer - log pi_generator);
    loss = -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) + kl_coeff (exp(d) - d - 1),
    d = log pi_reference - log pi_trainer (DeepSeekMath, arXiv 2402.03300, eq. 3 and 4; separate
    clip bounds: DAPO, arXiv 2503.14476, eq. 10; k3: Schulman 2020, "Approximating KL divergence").

    Args:
        clip_low: the ratio is clipped below at 1 - clip_low.
        clip_high: the ratio is clipped above at 1 + clip_high.
        kl_coeff: weight of the penalty; 0 needs no reference.
    """

    def __init__(
        self, clip_low: float = 0.2, clip_high: float = 0.2, kl_coeff: float = 0.0
    ) -> None:
        if not 0 < clip_low <= 1:
            raise ValueError(f"loss.clip_low: {clip_low} given; allowed: above 0, at most 1")
        if not clip_high > 0:
            raise ValueError(f"loss.clip_high: {clip_high} given; allowed: a number > 0")
        if not kl_coeff >= 0:
            raise ValueError(f"loss.kl_coeff: {kl_coeff} given; allowed: 0 or a number > 0")
        self.clip_low, self.clip_high, self.kl_coeff = clip_low, clip_high, kl_coeff

    def __call__(
        self,
        trainer_logprobs: Tensor,
        generator_logprobs: Tensor,
        advantages: Tensor,
        reference_logprobs: Tensor | None,
    ) -> tuple[Tensor, TokenMetrics]:
        """Loss of every token that the policy sampled (masked tokens are not in the input at all).

        Args:
            trainer_logprobs: [N] float32, of the weights in training; carries the gradient.
            generator_logprobs: [N] float32, of the distribution sampled from.
            advantages: [N] float32, each token that of its response.
            reference_logprobs: [N] float32; None where kl_coeff is 0.

        Returns:
            The loss per token [N] and the metrics per token, each [N] and detached.
        """
        ratio = torch.exp(trainer_logprobs - generator_logprobs)
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        policy_loss = -torch.minimum(ratio * advantages, clipped * advantages)
        is_clipped = clipped * advantages < ratio * advantages
        metrics = {
            "loss/policy": policy_loss.detach(),
            "ratio/mean": ratio.detach(),
            "ratio/max": ratio.detach(),
            "ratio/clip_fraction": is_clipped.float(),
        }
        if reference_logprobs is None:
            assert self.kl_coeff == 0, "kl_coeff > 0 without reference logprobs"
            return policy_loss, metrics
        kl = k3(trainer_logprobs, reference_logprobs)
        metrics["loss/kl_reference"] = kl.detach()
        return policy_loss + self.kl_coeff * kl, metrics


def k3(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """Schulman's k3 estimate of KL(pi || other) at each token sampled from pi; never negative.

    Args:
        logprobs: [N] of pi.
        other_logprobs: [N] of the other distribution, at the same tokens.

    Returns:
        [N] exp(d) - d - 1 with d = other_logprobs - logprobs.
    """
    difference = other_logprobs - logprobs
    return torch.expm1(difference) - difference
