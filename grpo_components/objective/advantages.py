"""Advantages: how much better each response is than its siblings, from the rewards of a batch.

Failed samples (reward NaN) count in no mean and no deviation and get advantage 0. Standard
deviations are those of the sample (n - 1).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class GroupNormalizedAdvantages:
    """A_i = (r_i - mean(r)) / (std(r) + eps) within each group.

    DeepSeekMath, arXiv 2402.03300, section 4.1.2 (outcome supervision).

    Args:
        eps: added to the standard deviation, in units of reward.
    """

    def __init__(self, eps: float = 1e-4) -> None:
        self.eps = _positive("advantages.eps", eps)

    def __call__(self, rewards: NDArray[np.float64]) -> NDArray[np.float32]:
        """Advantages of a batch.

        Args:
            rewards: [B, G] float64, one row per group; NaN where the sample failed.

        Returns:
            [B, G] float32.
        """
        centred, count = _centred(rewards)
        return (centred / (_deviation(centred, count) + self.eps)).astype(np.float32)


class BatchScaledAdvantages:
    """A_i = (r_i - mean(r) of its group) / (std(r) of the batch + eps).

    GRPO with the deviation of all rewards of the batch in place of the group's: Liu et al. 2025,
    "Part I: Tricks or Traps? A Deep Dive into RL for LLM Reasoning" (Lite PPO), arXiv 2508.08221;
    TRL's `scale_rewards: batch`. A prompt that is nearly always or nearly never answered gets no
    more weight than the others.

    Args:
        eps: added to the standard deviation, in units of reward.
    """

    def __init__(self, eps: float = 1e-4) -> None:
        self.eps = _positive("advantages.eps", eps)

    def __call__(self, rewards: NDArray[np.float64]) -> NDArray[np.float32]:
        """Advantages of a batch.

        Args:
            rewards: [B, G] float64, one row per group; NaN where the sample failed.

        Returns:
            [B, G] float32.
        """
        deviation = _deviation(*_centred(rewards.reshape(1, -1)))
        return (_centred(rewards)[0] / (deviation + self.eps)).astype(np.float32)


class GroupCenteredAdvantages:
    """A_i = r_i - mean(r) within each group, with no division by the standard deviation.

    Dr. GRPO, arXiv 2503.20783, section 3.2: dividing favours prompts that are nearly always or
    nearly never answered.
    """

    def __call__(self, rewards: NDArray[np.float64]) -> NDArray[np.float32]:
        """Advantages of a batch.

        Args:
            rewards: [B, G] float64, one row per group; NaN where the sample failed.

        Returns:
            [B, G] float32, in units of reward.
        """
        return _centred(rewards)[0].astype(np.float32)


class LeaveOneOutAdvantages:
    """A_i = r_i - mean of the other rewards of its group; 0 where there is no other.

    RLOO, arXiv 2402.14740. With n valid samples it equals n / (n - 1) (r_i - mean(r)).
    """

    def __call__(self, rewards: NDArray[np.float64]) -> NDArray[np.float32]:
        """Advantages of a batch.

        Args:
            rewards: [B, G] float64, one row per group; NaN where the sample failed.

        Returns:
            [B, G] float32, in units of reward.
        """
        centred, count = _centred(rewards)
        return (centred * (count / np.maximum(count - 1, 1))).astype(np.float32)


class BatchNormalizedAdvantages:
    """A_i = (r_i - mean(r)) / (std(r) + eps) over all rewards of the batch, whatever their group.

    The global advantage normalisation of REINFORCE++, arXiv 2501.03262, with responses in place of
    tokens: each counts once, whatever its length. The paper's own is `TokenNormalizedAdvantages`.

    Args:
        eps: added to the standard deviation, in units of reward.
    """

    def __init__(self, eps: float = 1e-4) -> None:
        self.eps = _positive("advantages.eps", eps)

    def __call__(self, rewards: NDArray[np.float64]) -> NDArray[np.float32]:
        """Advantages of a batch.

        Args:
            rewards: [B, G] float64, one row per group; NaN where the sample failed.

        Returns:
            [B, G] float32.
        """
        centred, count = _centred(rewards.reshape(1, -1))
        normalized = centred / (_deviation(centred, count) + self.eps)
        return normalized.reshape(rewards.shape).astype(np.float32)


def _centred(rewards: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Rewards minus the mean of their row (0 where failed), and the valid ones in each row."""
    valid = np.isfinite(rewards)
    count = valid.sum(axis=1, keepdims=True)
    mean = np.where(valid, rewards, 0.0).sum(axis=1, keepdims=True) / np.maximum(count, 1)
    return np.where(valid, rewards - mean, 0.0), count


def _deviation(centred: NDArray[np.float64], count: NDArray[np.int64]) -> NDArray[np.float64]:
    return np.sqrt((centred**2).sum(axis=1, keepdims=True) / np.maximum(count - 1, 1))


def _positive(key: str, value: float) -> float:
    if not value > 0:
        raise ValueError(f"{key}: {value} given; allowed: a number > 0")
    return value
