"""Advantages: how much better each response is than its siblings, from the rewards of a batch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class GroupNormalizedAdvantages:
    """A_i = (r_i - mean(r)) / (std(r) + eps) within each group.

    DeepSeekMath, arXiv 2402.03300, section 4.1.2 (outcome supervision).

    The standard deviation is that of the sample (n - 1). Failed samples (reward NaN) count in
    neither mean nor deviation and get advantage 0.

    Args:
        eps: added to the standard deviation, in units of reward.
    """

    def __init__(self, eps: float = 1e-4) -> None:
        if not eps > 0:
            raise ValueError(f"advantages.eps: {eps} given; allowed: a number > 0")
        self.eps = eps

    def __call__(self, rewards: NDArray[np.float64]) -> NDArray[np.float32]:
        """Advantages of a batch.

        Args:
            rewards: [B, G] float64, one row per group; NaN where the sample failed.

        Returns:
            [B, G] float32.
        """
        valid = np.isfinite(rewards)
        count = valid.sum(axis=1, keepdims=True)
        filled = np.where(valid, rewards, 0.0)
        mean = filled.sum(axis=1, keepdims=True) / np.maximum(count, 1)
        centred = np.where(valid, rewards - mean, 0.0)
        variance = (centred**2).sum(axis=1, keepdims=True) / np.maximum(count - 1, 1)
        return (centred / (np.sqrt(variance) + self.eps)).astype(np.float32)
