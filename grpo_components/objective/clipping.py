"""Clipped loss, importance weight and ratio metrics of tokens; an overflow never becomes a NaN."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_components.errors import ConfigError
from grpo_components.schedules import Schedule, Scheduled, as_schedule


def clipped_objective(
    log_ratio: Tensor,
    advantages: Tensor,
    low: float,
    high: float,
    dual_clip: float | None = None,
    log_weight: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the losses -w min(rho A, clip(rho, low, high) A), with a dual clip where A < 0.

    With a dual clip c, the loss of a token with A < 0 is -w max(min(rho A, clip(rho, low, high) A),
    c A): Ye et al. 2020, arXiv 1912.09729, eq. 5. A token has no gradient where a clip binds or A
    is 0.
    """
    ratio = log_ratio.detach().exp()
    too_low, too_high = (ratio < low) & (advantages < 0), (ratio > high) & (advantages > 0)
    bound = torch.where(too_low, low, torch.full_like(ratio, high))
    if dual_clip is not None:
        cut = (ratio > dual_clip) & (advantages < 0)
        bound, too_high = torch.where(cut, dual_clip, bound), too_high | cut
    clipped = too_low | too_high
    if log_weight is None:
        exponent = log_ratio
    else:
        # A single exponential: one factor alone may overflow although their product is small.
        exponent, bound = log_ratio + log_weight, bound * log_weight.exp()
    # The ratio of a token without gradient is kept out of the graph: it may have overflowed, and
    # zero times infinity is NaN, both forward (A = 0) and backward (min() has gradient zero).
    effective = torch.where(clipped | (advantages == 0), 0.0, exponent).exp()
    effective = torch.where(clipped, bound, effective)
    return -effective * advantages, ratio_metrics(ratio, too_low, too_high)


def importance_weight(log_ratio: Tensor, bound: float | None) -> Tensor:
    """Return min(exp(log_ratio), bound), without gradient; always finite, so that A = 0 gives 0."""
    ratio = log_ratio.detach().exp()
    return ratio.clamp(max=torch.finfo(ratio.dtype).max if bound is None else bound)


def ratio_metrics(ratio: Tensor, too_low: Tensor, too_high: Tensor) -> dict[str, Tensor]:
    """Return metrics [N] by logged key, from ratios [N] and whether each was clipped ([N] bool)."""
    return {
        "ratio/mean": ratio,
        "ratio/max": ratio,
        "ratio/clip_fraction": (too_low | too_high).float(),
        "ratio/clip_fraction_low": too_low.float(),
        "ratio/clip_fraction_high": too_high.float(),
    }


def checked_clip_low(value: Scheduled) -> Schedule:
    """Return the schedule of `loss.clip_low`, checked."""
    schedule = as_schedule("loss.clip_low", value)
    if not (schedule.lowest > 0 and schedule.highest <= 1):
        raise ConfigError("loss.clip_low", f"{value} given", "above 0, at most 1")
    return schedule


def checked_clip_high(value: Scheduled) -> Schedule:
    """Return the schedule of `loss.clip_high`, checked."""
    schedule = as_schedule("loss.clip_high", value)
    if not schedule.lowest > 0:
        raise ConfigError("loss.clip_high", f"{value} given", "a number > 0")
    return schedule


def checked_dual_clip(value: float | None) -> float | None:
    """Return the bound of the dual clip, `loss.dual_clip`, checked; None disables the dual clip."""
    # To Python a bool is an int, but in a config it is not a number.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (is_number and 1 < value < float("inf")):
        raise ConfigError("loss.dual_clip", f"{value} given", "a number > 1, or null")
    return value
