"""Losses with a bug, as a fork of the recipe or a component of a user's would have them."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_components.objective.clipping import ratio_metrics
from grpo_components.objective.losses import LossInputs, TokenMetrics


class RatioIsOne:
    """GRPO whose ratio is the policy over itself: it looks corrected and clipped; it is not."""

    def __init__(self, clip_low: float = 0.2, clip_high: float = 0.2) -> None:
        self._low, self._high = 1 - clip_low, 1 + clip_high

    def __call__(self, tokens: LossInputs) -> tuple[Tensor, TokenMetrics]:
        """Return losses [N] and metrics [N]."""
        ratio = (tokens.trainer_logprobs - tokens.trainer_logprobs.detach()).exp()
        clipped = ratio.clamp(self._low, self._high)
        losses = -torch.min(ratio * tokens.advantages, clipped * tokens.advantages)
        seen = ratio.detach()
        return losses, ratio_metrics(seen, seen < self._low, seen > self._high)


class ClippedWeightInGradient:
    """CISPO without its stop-gradient: a clipped token has no gradient, whatever its advantage."""

    def __init__(self, clip_low: float = 0.2, clip_high: float = 0.2) -> None:
        self._low, self._high = 1 - clip_low, 1 + clip_high

    def __call__(self, tokens: LossInputs) -> tuple[Tensor, TokenMetrics]:
        """Return losses [N] and metrics [N]."""
        ratio = (tokens.trainer_logprobs - tokens.anchor_logprobs).exp()
        seen = ratio.detach()
        losses = -ratio.clamp(self._low, self._high) * tokens.advantages
        return losses, ratio_metrics(seen, seen < self._low, seen > self._high)


class ClippingOff:
    """GRPO whose bounds are such that they never bind, which its metrics do not show."""

    def __init__(self, clip_low: float = 0.2, clip_high: float = 0.2) -> None:
        del clip_low, clip_high  # read from the config, and then used for the metrics only

    def __call__(self, tokens: LossInputs) -> tuple[Tensor, TokenMetrics]:
        """Return losses [N] and metrics [N]."""
        ratio = (tokens.trainer_logprobs - tokens.anchor_logprobs).clamp(max=80).exp()
        bounded = ratio.clamp(0.0, 1e9)
        losses = -torch.min(ratio * tokens.advantages, bounded * tokens.advantages)
        seen = ratio.detach()
        return losses, ratio_metrics(seen, seen < 0.0, seen > 1e9)


class MaskedByMultiplication:
    """GRPO that masks tokens far off the policy by a factor 0, which leaves 0 * inf = NaN."""

    def __init__(self, clip_low: float = 0.2, clip_high: float = 0.2) -> None:
        self._low, self._high = 1 - clip_low, 1 + clip_high

    def __call__(self, tokens: LossInputs) -> tuple[Tensor, TokenMetrics]:
        """Return losses [N] and metrics [N]."""
        log_ratio = tokens.trainer_logprobs - tokens.anchor_logprobs
        ratio = log_ratio.exp()
        clipped = ratio.clamp(self._low, self._high)
        keep = (log_ratio.detach().abs() < 5).float()
        losses = -keep * torch.min(ratio * tokens.advantages, clipped * tokens.advantages)
        seen = ratio.detach()
        return losses, ratio_metrics(seen, seen < self._low, seen > self._high)
