"""Corrections for tokens whose sampling probabilities in the generator are not the trainer's.

Every class is a preset: it turns the log ratios d_t = log pi_proximal - log pi_generator of sampled
tokens (pi_proximal: the trainer's policy at the training step's start) into one weight per token.
Its arguments are `log_ratios` [N] of the trained tokens of whole responses, laid end to end, and
`sequence_ids` [N] int64, 0 to S - 1; it returns weights [N] of the log ratios' dtype.
The weight multiplies the token's policy loss and carries no gradient; weight 0 masks the token
(`composition.py`). T is the number of a response's trained tokens. With `stale_tokens: mask`, the
first tokens of a response may be too old to train; sums and means leave them out. Log ratios, and
their sums and means over a response, are clamped to +-20 before the exponential, so that no ratio
overflows.

Attributes of a preset, False where not set. `anchors_at_proximal`: the weight is the importance
weight from the generator to the proximal policy; the loss then takes its own ratio to the proximal
policy, so that nothing is corrected twice. `needs_advantages`: the preset gets the advantages as
third argument. `follows_updates`: the log ratios are of the policy in training, not pi_proximal;
every update of the step changes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from grpo_components.errors import ConfigError
from grpo_components.objective.losses import LossInputs

MAX_LOG_RATIO = 20.0
# Bins of a log ratio d, equally wide in asinh(d / _SMALLEST): 2.3 % of abs(d), at 0 2.3e-10 wide.
_SMALLEST, _BINS, _REACH = 1e-8, 1_901, 22.2  # MAX_LOG_RATIO is at 22.11


class NoCorrection:
    """No correction, w_t = 1: only the loss's own ratio to the generator corrects."""

    def __call__(self, log_ratios: Tensor, sequence_ids: Tensor) -> Tensor:
        """Return the weights [N] of a micro-batch's tokens."""
        return torch.ones_like(log_ratios.detach())


class TokenTIS:
    """Truncated importance sampling of each token: w_t = min(exp(d_t), cap).

    Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"; the
    truncation is that of Ionides 2008, "Truncated Importance Sampling". The variance is low; a bias
    remains, because a token's weight leaves out the ratios of the tokens before it.

    Args:
        cap: largest weight, at least 1; 2 is usual, 1.5 to 5 are in use.
    """

    anchors_at_proximal = True

    def __init__(self, cap: float = 2.0) -> None:
        self.cap = _checked_cap(cap)

    def __call__(self, log_ratios: Tensor, sequence_ids: Tensor) -> Tensor:
        """Return the weights [N] of a micro-batch's tokens."""
        return _ratios(log_ratios.detach()).clamp(max=self.cap)


class SequenceTIS:
    """Truncated importance sampling of each response: w = min(exp(sum_t d_t), cap) for its tokens.

    Liu, Li et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the
    Training-Inference Mismatch" (sequence-level TIS). Unbiased but for the cap; the variance grows
    with the length of the responses.

    Args:
        cap: largest weight, at least 1; 2 to 10 are in use.
    """

    anchors_at_proximal = True

    def __init__(self, cap: float = 2.0) -> None:
        self.cap = _checked_cap(cap)

    def __call__(self, log_ratios: Tensor, sequence_ids: Tensor) -> Tensor:
        """Return the weights [N] of a micro-batch's tokens."""
        sums, _ = _sums(log_ratios, sequence_ids)
        return _ratios(sums).clamp(max=self.cap)[sequence_ids].to(log_ratios.dtype)


class MaskedIS:
    """Masked importance sampling: w = rho where low <= rho <= high, else 0.

    With level token, rho_t = exp(d_t) of each token: IcePop (Ling Team 2025, "Every Step Evolves",
    arXiv 2510.18855, the function M(k)). With level sequence, rho = exp(sum_t d_t) for all tokens
    of a response: Liu, Li et al. 2025, "When Speed Kills Stability" (there without lower bound:
    low 0). Truncation still learns from a token with an extreme ratio; a mask drops the token.

    Args:
        low: smallest ratio that is kept, below 1; 0 disables the lower bound.
        high: largest ratio that is kept, above 1.
        level: `token` compares the ratio of each token, `sequence` that of the whole response.
    """

    anchors_at_proximal = True

    def __init__(
        self, low: float = 0.5, high: float = 5.0, level: Literal["token", "sequence"] = "token"
    ) -> None:
        self.low, self.high = _checked_band(low, high)
        if level not in ("token", "sequence"):
            raise ConfigError("off_policy.level", f"{level!r} given", "token, sequence")
        self.level = level

    def __call__(self, log_ratios: Tensor, sequence_ids: Tensor) -> Tensor:
        """Return the weights [N] of a micro-batch's tokens."""
        if self.level == "token":
            ratios = _ratios(log_ratios.detach())
        else:
            ratios = _ratios(_sums(log_ratios, sequence_ids)[0])[sequence_ids]
        kept = (ratios >= self.low) & (ratios <= self.high)
        return torch.where(kept, ratios, 0.0).to(log_ratios.dtype)


class GeometricMask:
    """Keeps or masks whole responses: w = 1 where low <= exp(sum_t d_t / T) <= high, else 0.

    The geometric mean of a response's ratios does not grow with its length, so that long responses
    are not masked for being long: Liu, Li et al. 2025, "When Speed Kills Stability" (geometric
    level); the rejection of verl's rollout correction (preset geo_rs) and of SkyRL. The mask is not
    an importance weight: combine it with a loss that has the true ratio to the generator.

    Args:
        low: smallest geometric mean that is kept, below 1; 0 disables the lower bound.
        high: largest geometric mean that is kept, above 1; 1.001 to 1.01 are in use where generator
            and trainer differ by their engines only; older data needs more.
    """

    def __init__(self, low: float = 0.99, high: float = 1.01) -> None:
        self.low, self.high = _checked_band(low, high)

    def __call__(self, log_ratios: Tensor, sequence_ids: Tensor) -> Tensor:
        """Return the weights [N] of a micro-batch's tokens."""
        sums, counts = _sums(log_ratios, sequence_ids)
        means = _ratios(sums / counts)
        kept = (means >= self.low) & (means <= self.high)
        return kept[sequence_ids].to(log_ratios.dtype)


class OffPolicySequenceMask:
    """Masks responses with A < 0 that are too far off-policy, and keeps all others.

    w = 0 where A < 0 and sum_t -d_t / T > threshold, else 1: DeepSeek-V3.2, arXiv 2512.02556,
    eq. 9 (off-policy sequence masking); `off_policy_mask_threshold` of TRL. The mean of -d_t =
    log pi_generator - log pi_trainer estimates KL(generator || trainer). A bad response that is
    already much less likely under the trainer need not be pushed down further. Here, every
    update of the step computes d_t anew, from the policy in training. The mask is not an importance
    weight: the loss's own ratio is that to the generator, as in the paper.

    Args:
        threshold: largest mean that is kept, in nats per token; above 0. The paper gives no value;
            0.5 is TRL's example.
    """

    needs_advantages = True
    follows_updates = True

    def __init__(self, threshold: float = 0.5) -> None:
        if not 0 < threshold < float("inf"):
            raise ConfigError("off_policy.threshold", f"{threshold} given", "a finite number > 0")
        self.threshold = threshold

    def __call__(self, log_ratios: Tensor, sequence_ids: Tensor, advantages: Tensor) -> Tensor:
        """Return the weights [N] of a micro-batch's tokens."""
        sums, counts = _sums(log_ratios, sequence_ids)
        far = (-sums / counts > self.threshold)[sequence_ids]
        return (~(far & (advantages < 0))).to(log_ratios.dtype)


def correction_weights(
    correction: Callable[..., Tensor], inputs: LossInputs, start_logprobs: Tensor
) -> Tensor:
    """Compute off-policy weights [N]; the policy at the step's start gave `start_logprobs` [N]."""
    follows = getattr(correction, "follows_updates", False)
    policy = inputs.trainer_logprobs.detach() if follows else start_logprobs
    more = (inputs.advantages,) if getattr(correction, "needs_advantages", False) else ()
    return correction(policy - inputs.generator_logprobs, inputs.sequence_ids, *more)


def mismatch_sums(log_ratios: Tensor, weights: Tensor, fresh: Tensor) -> tuple[Tensor, Tensor]:
    """Sum up a micro-batch for `mismatch_summary`: return sums [7 + bins] and the largest ratio."""
    log_ratio = log_ratios.detach().double().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio, k3 = log_ratio.exp(), log_ratio.expm1() - log_ratio
    masked, fresh_k3 = weights == 0, torch.where(fresh, k3, 0.0)
    rows = [k3, ratio, ratio.square(), masked, weights, fresh, fresh_k3]
    # Bins leave out a NaN, which the largest ratio keeps.
    counts = torch.histc((log_ratio / _SMALLEST).asinh(), _BINS, -_REACH, _REACH)
    return torch.cat([torch.stack(rows).sum(1), counts]), ratio.max()


def mismatch_summary(sums: Tensor, ratio_max: Tensor, tokens: int) -> dict[str, float]:
    """Measure how far a training step's data is from the trainer's policy, before any clip or cap.

    With rho_t = exp(d_t): `mismatch/generator_kl` is the mean of rho - d - 1 (k3, Schulman 2020,
    "Approximating KL divergence"), an estimate of KL(generator || trainer) in nats per token;
    `mismatch/effective_sample_size` is (sum rho)^2 / (M sum rho^2) for M tokens, in (0, 1] (Kong
    1992). `mismatch/fresh_kl` is the KL over responses that the trainer's current version sampled,
    so no update has caused it.
    """
    k3, ratio, square, masked, weight, fresh, fresh_k3 = sums[:7]
    places = (tokens - 1) * torch.tensor([0.01, 0.5, 0.99], dtype=sums.dtype)
    ends = sums[7:].cumsum(0)[:-1]
    bins = torch.bucketize(torch.stack([places.floor(), places.ceil()]), ends, right=True)
    low, high = (((bins.double() - _BINS // 2) * (2 * _REACH / _BINS)).sinh() * _SMALLEST).exp()
    p01, p50, p99 = low.lerp(high, places.frac()).minimum(ratio_max)
    summary = {
        "mismatch/generator_kl": k3 / tokens,
        "mismatch/ratio_p01": p01,
        "mismatch/ratio_p50": p50,
        "mismatch/ratio_p99": p99,
        "mismatch/ratio_max": ratio_max,
        "mismatch/effective_sample_size": ratio.square() / (tokens * square),
        "off_policy/masked_fraction": masked / tokens,
        "off_policy/correction_mass": weight / tokens,
    }
    if fresh:
        summary |= {"mismatch/fresh_kl": fresh_k3 / fresh, "mismatch/fresh_tokens": fresh}
    return {key: value.item() for key, value in summary.items()}


def _ratios(log_ratios: Tensor) -> Tensor:
    return log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _sums(log_ratios: Tensor, sequence_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return each response's sum of log ratios and number of tokens: [N] float64, [N] int64."""
    # N places, of which the last stay 0: to count the responses would wait for the device.
    ones = torch.ones_like(sequence_ids)
    counts = torch.zeros_like(ones).index_add_(0, sequence_ids, ones)
    # In float64: the sum of thousands of small terms decides whether a whole response is kept.
    values = log_ratios.detach().double()
    return torch.zeros_like(values).index_add_(0, sequence_ids, values), counts


def _checked_cap(cap: float) -> float:
    if not cap >= 1:
        raise ConfigError("off_policy.cap", f"{cap} given", "a number >= 1")
    return cap


def _checked_band(low: float, high: float) -> tuple[float, float]:
    # Ratio 1 must lie strictly inside, so that an on-policy token is never masked.
    if not 0 <= low < 1:
        raise ConfigError("off_policy.low", f"{low} given", "at least 0, below 1")
    if not high > 1:
        raise ConfigError("off_policy.high", f"{high} given", "a number > 1")
    return low, high
