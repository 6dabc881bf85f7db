"""Policy losses: one number per token, from logprobs and advantages, in pure torch.

The ratio is rho = exp(log pi_trainer - log pi_anchor), A is the advantage, sg() stops the gradient.
The recipe's own `grpo_loss` is the default; the config's `loss._component_` names one of these.

A loss does not handle the off-policy correction or the KL and entropy terms: `composition.py`
weights the returned losses and adds the terms. Attributes of a loss ask for optional inputs:
`needs_proximal` for the logprobs of the policy at the start of the step, `needs_reference` for
those of the reference, `needs_entropy` for an entropy with a gradient.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from grpo_components.errors import ConfigError
from grpo_components.schedules import Schedule, Scheduled, as_schedule

TokenMetrics = dict[str, Tensor]
"""Values [N] by metric key; their mean is logged, or their maximum if the key ends in `max`."""


@dataclass(frozen=True)
class LossInputs:
    """Inputs of a loss: the N trained tokens of a micro-batch, whole responses laid end to end."""

    trainer_logprobs: Tensor
    """[N] float32, logprobs under the weights in training; they carry the gradient."""
    generator_logprobs: Tensor
    """[N] float32, logprobs under the distribution that the generator sampled from."""
    advantages: Tensor
    """[N] float32: the advantage of the token's response, or of the token itself if the config's
    `advantages` are per token. A multiple of the KL to the teacher (if any) is subtracted."""
    sequence_ids: Tensor
    """[N] int64, 0 to S - 1: the response of each token; tokens of a response are contiguous."""
    staleness: Tensor
    """[N] int64, the trainer's policy version minus the version that sampled the token."""
    step: int
    """Number of training steps done before this one; the argument of schedules."""
    reference_logprobs: Tensor | None = None
    """[N] float32, logprobs under the reference; None without one."""
    teacher_logprobs: Tensor | None = None
    """[N] float32, logprobs under the teacher; None without one."""
    proximal_logprobs: Tensor | None = None
    """[N] float32, logprobs (no gradient) under the policy at the step's start; None if unused."""
    entropy: Tensor | None = None
    """[N] float32, entropy of the policy at each token, in nats. It carries a gradient only with
    `loss.entropy_coeff` or a loss with the attribute `needs_entropy = True`."""
    kept: Tensor | None = None
    """[N] bool, False where the off-policy correction masks the token: then its inputs are all 0,
    and its loss will be set to 0. For losses that combine tokens; None without a correction."""

    @property
    def anchor_logprobs(self) -> Tensor:
        """[N] float32, logprobs in the ratio's denominator: proximal if given, else generator's."""
        if self.proximal_logprobs is None:
            return self.generator_logprobs
        return self.proximal_logprobs


def at_step(
    loss: Callable[..., tuple[Tensor, TokenMetrics]], settings: Mapping[str, Scheduled]
) -> Callable[[LossInputs], tuple[Tensor, TokenMetrics]]:
    """Bind a loss function to its settings; each call evaluates schedules at `tokens.step`."""
    schedules = {name: as_schedule(f"loss.{name}", value) for name, value in settings.items()}

    @functools.wraps(getattr(loss, "func", loss))  # of a partial: the function inside
    def scheduled(tokens: LossInputs) -> tuple[Tensor, TokenMetrics]:
        return loss(tokens, **{name: value(tokens.step) for name, value in schedules.items()})

    return scheduled


class GRPOLoss:
    """Clipped ratio per token: -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A).

    With SequenceMean: DeepSeekMath, arXiv 2402.03300, eq. 3; separate bounds, "clip higher": DAPO,
    arXiv 2503.14476, eq. 10; dual clip: Ye et al. 2020, arXiv 1912.09729, eq. 5. Where the clip
    binds, the token has no gradient.

    Args:
        clip_low: the ratio is clipped below at 1 - clip_low; a number or a schedule.
        clip_high: the ratio is clipped above at 1 + clip_high; a number or a schedule.
        dual_clip: upper bound of the ratio where A < 0: there, min(rho A, clip(rho) A) is raised to
            at least dual_clip A. It must be above 1 (the paper: 3); null disables it.
    """

    def __init__(
        self, clip_low: Scheduled = 0.2, clip_high: Scheduled = 0.2, dual_clip: float | None = None
    ) -> None:
        self.clip_low, self.clip_high = _checked_clip(clip_low, clip_high)
        self.dual_clip = _checked_dual_clip(dual_clip)

    def __call__(self, tokens: LossInputs) -> tuple[Tensor, TokenMetrics]:
        """Return losses [N] with a gradient, and metrics [N] without."""
        low, high = 1 - self.clip_low(tokens.step), 1 + self.clip_high(tokens.step)
        log_ratio = tokens.trainer_logprobs - tokens.anchor_logprobs
        return clipped_objective(log_ratio, tokens.advantages, low, high, self.dual_clip)


class GSPOLoss:
    """Clipped ratio per response: s = exp(mean of log rho over its tokens) in place of rho.

    GSPO, arXiv 2507.18071, eq. 5 to 7. Each token's loss is that of its response,
    -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), and the gradient goes through s to all its
    tokens, so that SequenceMean gives the paper's objective. The mean leaves out tokens that
    are not trained: masked by a correction, or too old.

    Args:
        clip_low: s is clipped below at 1 - clip_low; a number or a schedule.
        clip_high: s is clipped above at 1 + clip_high; a number or a schedule. Both defaults are
            the paper's (section 5.1): s, a mean over tokens, varies far less than one token's rho.
        dual_clip: upper bound of s where A < 0, a number above 1; null disables it.
    """

    def __init__(
        self,
        clip_low: Scheduled = 3e-4,
        clip_high: Scheduled = 4e-4,
        dual_clip: float | None = None,
    ) -> None:
        self.clip_low, self.clip_high = _checked_clip(clip_low, clip_high)
        self.dual_clip = _checked_dual_clip(dual_clip)

    def __call__(self, tokens: LossInputs) -> tuple[Tensor, TokenMetrics]:
        """Return losses [N] with a gradient, and metrics [N] without."""
        low, high = 1 - self.clip_low(tokens.step), 1 + self.clip_high(tokens.step)
        log_ratio = tokens.trainer_logprobs - tokens.anchor_logprobs
        sums = torch.zeros_like(log_ratio).index_add(0, tokens.sequence_ids, log_ratio)
        kept = (
            torch.ones_like(log_ratio) if tokens.kept is None else tokens.kept.to(log_ratio.dtype)
        )
        counts = torch.zeros_like(kept).index_add(0, tokens.sequence_ids, kept).clamp(min=1)
        mean_log_ratio = (sums / counts)[tokens.sequence_ids]
        return clipped_objective(mean_log_ratio, tokens.advantages, low, high, self.dual_clip)


class CISPOLoss:
    """REINFORCE with a clipped weight: -sg(clip(rho, 1 - clip_low, 1 + clip_high)) A log pi.

    MiniMax-M1, arXiv 2506.13585, eq. 4 and 5. Only the weight is clipped: every token keeps a
    gradient. The logged clip fractions count the tokens whose weight is changed.

    Args:
        clip_low: the weight is at least 1 - clip_low; 1 disables the bound (as in the paper's
            runs); a number or a schedule.
        clip_high: the weight is at most 1 + clip_high; a number or a schedule.
    """

    def __init__(self, clip_low: Scheduled = 1.0, clip_high: Scheduled = 4.0) -> None:
        self.clip_low, self.clip_high = _checked_clip(clip_low, clip_high)

    def __call__(self, tokens: LossInputs) -> tuple[Tensor, TokenMetrics]:
        """Return losses [N] with a gradient, and metrics [N] without."""
        low, high = 1 - self.clip_low(tokens.step), 1 + self.clip_high(tokens.step)
        ratio = (tokens.trainer_logprobs.detach() - tokens.anchor_logprobs).exp()
        policy_loss = -ratio.clamp(low, high) * tokens.advantages * tokens.trainer_logprobs
        return policy_loss, ratio_metrics(ratio, ratio < low, ratio > high)


class REINFORCELoss:
    """REINFORCE with an importance weight per token: -sg(min(rho, max_ratio)) A log pi.

    Williams 1992. With LeaveOneOutAdvantages it is RLOO, arXiv 2402.14740. On-policy, the weight
    is 1. The logged clip fraction counts the tokens whose weight is cut to max_ratio.

    Args:
        max_ratio: largest weight; null sets no bound: then the weight of a token, given the tokens
            before it, is unbiased.
    """

    def __init__(self, max_ratio: float | None = None) -> None:
        self.max_ratio = _positive_or_none("loss.max_ratio", max_ratio)

    def __call__(self, tokens: LossInputs) -> tuple[Tensor, TokenMetrics]:
        """Return losses [N] with a gradient, and metrics [N] without."""
        ratio = (tokens.trainer_logprobs.detach() - tokens.anchor_logprobs).exp()
        bound = math.inf if self.max_ratio is None else self.max_ratio
        weight = ratio.clamp(max=min(bound, torch.finfo(ratio.dtype).max))  # finite: A = 0 gives 0
        policy_loss = -weight * tokens.advantages * tokens.trainer_logprobs
        too_high = ratio > bound
        return policy_loss, ratio_metrics(ratio, torch.zeros_like(too_high), too_high)


class DecoupledPPOLoss:
    """PPO clipped against a proximal policy, with a second weight w to correct for the generator.

    -w min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A), with rho = pi_trainer / pi_proximal and
    w = sg(min(pi_proximal / pi_generator, max_weight)): Hilton et al., arXiv 2110.00641; AReaL,
    arXiv 2505.24298, section 5.2. The proximal policy is the trainer's at the start of the step.
    Its logprobs are `recomputed` by the trainer or, without that pass, estimated as `loglinear`
    (A-3PO, arXiv 2512.06547):

        log pi_proximal = (1/d) log pi_generator + (1 - 1/d) sg(log pi_trainer), where d >= 1
        log pi_proximal = sg(log pi_trainer), where d = 0

    d is the token's staleness, the version in training minus the version that sampled it. So at
    d = 1 the proximal policy is the generator's, and a fresh token (d = 0) is never clipped.
    w already corrects from the generator to the proximal policy. A further off-policy correction
    would do that twice, unless it only masks.

    Args:
        clip_low: the ratio is clipped below at 1 - clip_low; a number or a schedule.
        clip_high: the ratio is clipped above at 1 + clip_high; a number or a schedule.
        max_weight: largest w, to which larger ones are cut; null sets no bound.
        proximal: how the proximal logprobs are made, `recomputed` or `loglinear`.
        dual_clip: upper bound of the ratio where A < 0, a number above 1; null disables it.
    """

    def __init__(
        self,
        clip_low: Scheduled = 0.2,
        clip_high: Scheduled = 0.2,
        max_weight: float | None = 5.0,
        proximal: Literal["recomputed", "loglinear"] = "recomputed",
        dual_clip: float | None = None,
    ) -> None:
        self.clip_low, self.clip_high = _checked_clip(clip_low, clip_high)
        self.dual_clip = _checked_dual_clip(dual_clip)
        self.max_weight = _positive_or_none("loss.max_weight", max_weight)
        if proximal not in ("recomputed", "loglinear"):
            raise ConfigError("loss.proximal", f"{proximal} given", "recomputed, loglinear")
        self.needs_proximal = proximal == "recomputed"

    def __call__(self, tokens: LossInputs) -> tuple[Tensor, TokenMetrics]:
        """Return losses [N] with a gradient, and metrics [N] without."""
        if self.needs_proximal:
            assert tokens.proximal_logprobs is not None, "proximal: recomputed, but none given"
            proximal_logprobs = tokens.proximal_logprobs
        else:
            proximal_logprobs = _loglinear_proximal(tokens)
        low, high = 1 - self.clip_low(tokens.step), 1 + self.clip_high(tokens.step)
        log_weight = proximal_logprobs - tokens.generator_logprobs
        if self.max_weight is not None:
            log_weight = log_weight.clamp(max=math.log(self.max_weight))
        log_ratio = tokens.trainer_logprobs - proximal_logprobs
        return clipped_objective(
            log_ratio, tokens.advantages, low, high, self.dual_clip, log_weight
        )


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


def ratio_metrics(ratio: Tensor, too_low: Tensor, too_high: Tensor) -> dict[str, Tensor]:
    """Return metrics [N] by logged key, from ratios [N] and whether each was clipped ([N] bool)."""
    return {
        "ratio/mean": ratio,
        "ratio/max": ratio,
        "ratio/clip_fraction": (too_low | too_high).float(),
        "ratio/clip_fraction_low": too_low.float(),
        "ratio/clip_fraction_high": too_high.float(),
    }


def _loglinear_proximal(tokens: LossInputs) -> Tensor:
    trainer, generator = tokens.trainer_logprobs.detach(), tokens.generator_logprobs
    share = 1 - 1 / tokens.staleness.clamp(min=1).to(trainer.dtype)
    return torch.where(tokens.staleness > 0, torch.lerp(generator, trainer, share), trainer)


def _checked_clip(clip_low: Scheduled, clip_high: Scheduled) -> tuple[Schedule, Schedule]:
    low, high = as_schedule("loss.clip_low", clip_low), as_schedule("loss.clip_high", clip_high)
    if not (low.lowest > 0 and low.highest <= 1):
        raise ConfigError("loss.clip_low", f"{clip_low} given", "above 0, at most 1")
    if not high.lowest > 0:
        raise ConfigError("loss.clip_high", f"{clip_high} given", "a number > 0")
    return low, high


def _checked_dual_clip(value: float | None) -> float | None:
    is_number = isinstance(value, int | float)
    if value is not None and not (is_number and 1 < value < math.inf):
        raise ConfigError("loss.dual_clip", f"{value} given", "a number > 1, or null")
    return value


def _positive_or_none(key: str, value: float | None) -> float | None:
    if value is not None and not value > 0:
        raise ConfigError(key, f"{value} given", "a number > 0, or null")
    return value
