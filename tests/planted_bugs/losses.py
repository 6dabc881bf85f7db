"""Losses with a bug, as a fork of the recipe or a component of a user's would have them."""

from torch import Tensor

from grpo_components.objective.losses import LossInputs, TokenMetrics, ratio_metrics

Bounds = tuple[float, float]


def _clipped(ratio: Tensor, tokens: LossInputs, bounds: Bounds) -> tuple[Tensor, TokenMetrics]:
    """Return PPO's losses [N] and metrics [N] of a ratio [N], which may have the bug."""
    low, high = bounds
    clipped = ratio.clamp(low, high)
    losses = -(ratio * tokens.advantages).min(clipped * tokens.advantages)
    seen = ratio.detach()
    return losses, ratio_metrics(seen, seen < low, seen > high)


class RatioIsOne:
    """GRPO whose ratio is the policy over itself: it looks corrected and clipped; it is not."""

    published = "meta-pytorch/torchforge#p571"

    def __init__(self, clip_low: float = 0.2, clip_high: float = 0.2) -> None:
        self._bounds = 1 - clip_low, 1 + clip_high

    def __call__(self, tokens: LossInputs) -> tuple[Tensor, TokenMetrics]:
        ratio = (tokens.trainer_logprobs - tokens.trainer_logprobs.detach()).exp()
        return _clipped(ratio, tokens, self._bounds)


class ClippedWeightInGradient:
    """CISPO without its stop-gradient: a clipped token has no gradient, whatever its advantage."""

    published = "areal-project/AReaL#1421"

    def __init__(self, clip_low: float = 0.2, clip_high: float = 0.2) -> None:
        self._bounds = 1 - clip_low, 1 + clip_high

    def __call__(self, tokens: LossInputs) -> tuple[Tensor, TokenMetrics]:
        ratio = (tokens.trainer_logprobs - tokens.anchor_logprobs).exp()
        _, metrics = _clipped(ratio, tokens, self._bounds)
        return -ratio.clamp(*self._bounds) * tokens.advantages, metrics


class ClippingOff:
    """GRPO whose bounds are such that they never bind, which its metrics do not show."""

    published = "GMISWE/tinker-cloud#p75"

    def __init__(self, clip_low: float = 0.2, clip_high: float = 0.2) -> None:
        del clip_low, clip_high  # read from the config, and then used for nothing

    def __call__(self, tokens: LossInputs) -> tuple[Tensor, TokenMetrics]:
        ratio = (tokens.trainer_logprobs - tokens.anchor_logprobs).clamp(max=80).exp()
        return _clipped(ratio, tokens, (0.0, 1e9))


class MaskedByMultiplication:
    """GRPO that masks tokens far off the policy by a factor 0, which leaves 0 * inf = NaN."""

    def __init__(self, clip_low: float = 0.2, clip_high: float = 0.2) -> None:
        self._bounds = 1 - clip_low, 1 + clip_high

    def __call__(self, tokens: LossInputs) -> tuple[Tensor, TokenMetrics]:
        log_ratio = tokens.trainer_logprobs - tokens.anchor_logprobs
        losses, metrics = _clipped(log_ratio.exp(), tokens, self._bounds)
        return (log_ratio.detach().abs() < 5).float() * losses, metrics
