"""Estimates of KL(policy || other) from the tokens that the policy sampled.

Schulman 2020, "Approximating KL divergence" (joschu.net/blog/kl-approx.html). With
d = log other - log policy at a sampled token:

    name  value           as an estimate         in the loss: gradient = factor * grad log policy
    k1    -d              unbiased, noisy        1: zero on average, no pull
    k2    d^2 / 2         biased, >= 0           -d: on average that of KL(policy || other)
    k3    exp(d) - d - 1  unbiased, >= 0         1 - exp(d): on average that of KL(other || policy)

k1 belongs in the reward: there, its policy gradient is on average the exact gradient of
KL(policy || other). The same holds for k2's gradient in the loss. Averages are over the policy's
own samples; for tokens of an older policy they hold only as far as the two policies agree.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def k1(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """Return k1, the log ratio; use it in the reward: in the loss, its gradient averages zero."""
    return logprobs - other_logprobs


def k2(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """Return k2, half the squared log ratio; in the loss it acts like k1 in the reward."""
    return 0.5 * (logprobs - other_logprobs) ** 2


def k3(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """Return k3, unbiased and >= 0; in the loss, its gradient is that of KL(other || policy)."""
    difference = other_logprobs - logprobs
    return torch.expm1(difference) - difference


ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
