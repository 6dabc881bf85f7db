"""Advantages: how far the reward of each response is above the mean of its group or batch.

Each class maps the rewards of a batch, [B, G] float64 (B prompts with a group of G responses each),
to advantages, [B, G] float32. Failed samples (reward NaN) are left out of every mean and deviation
and get advantage 0. Standard deviations are sample deviations, with divisor n - 1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from grpo_components.errors import ConfigError


class GroupNormalizedAdvantages:
    """Normalizes rewards within each group: A_i = (r_i - mean(r)) / (std(r) + eps).

    DeepSeekMath, arXiv 2402.03300, section 4.1.2 (outcome supervision).

    Args:
        eps: added to the standard deviation, in units of reward.
    """

    def __init__(self, eps: float = 1e-4) -> None:
        self.eps = checked_eps(eps)

    def __call__(self, rewards: NDArray[np.float64]) -> NDArray[np.float32]:
        """Return the advantages [B, G] of rewards [B, G]."""
        centred, count = _centred(rewards)
        return (centred / (_deviation(centred, count) + self.eps)).astype(np.float32)


class BatchScaledAdvantages:
    """Centers by group, scales by batch: A_i = (r_i - mean(r) of group) / (std(r) of batch + eps).

    GRPO with the deviation of all rewards of the batch in place of the group's: Liu et al. 2025,
    "Part I: Tricks or Traps? A Deep Dive into RL for LLM Reasoning" (Lite PPO), arXiv 2508.08221;
    TRL's `scale_rewards: batch`. A prompt that is nearly always or nearly never solved gets no
    more weight than the others.

    Args:
        eps: added to the standard deviation, in units of reward.
    """

    def __init__(self, eps: float = 1e-4) -> None:
        self.eps = checked_eps(eps)

    def __call__(self, rewards: NDArray[np.float64]) -> NDArray[np.float32]:
        """Return the advantages [B, G] of rewards [B, G]."""
        deviation = _deviation(*_centred(rewards.reshape(1, -1)))
        return (_centred(rewards)[0] / (deviation + self.eps)).astype(np.float32)


class GroupCenteredAdvantages:
    """Centers rewards within each group, without dividing by the deviation: A_i = r_i - mean(r).

    Dr. GRPO, arXiv 2503.20783, section 3.2: dividing by the deviation would give more weight to
    prompts that are nearly always or nearly never solved.
    """

    def __call__(self, rewards: NDArray[np.float64]) -> NDArray[np.float32]:
        """Return the advantages [B, G] of rewards [B, G]."""
        return _centred(rewards)[0].astype(np.float32)


class LeaveOneOutAdvantages:
    """Compares a response with the others of its group: A_i = r_i - mean of the others' rewards.

    RLOO, arXiv 2402.14740. With n valid samples in the group, A_i = n / (n - 1) (r_i - mean(r)); a
    single valid sample gets 0.
    """

    def __call__(self, rewards: NDArray[np.float64]) -> NDArray[np.float32]:
        """Return the advantages [B, G] of rewards [B, G]."""
        centred, count = _centred(rewards)
        return (centred * (count / np.maximum(count - 1, 1))).astype(np.float32)


class BatchNormalizedAdvantages:
    """Normalizes rewards over the whole batch: A_i = (r_i - mean(r)) / (std(r) + eps).

    The global advantage normalisation of REINFORCE++, arXiv 2501.03262, with responses in place of
    tokens: each response counts once, whatever its length. `TokenNormalizedAdvantages` is the
    paper's own form.

    Args:
        eps: added to the standard deviation, in units of reward.
    """

    def __init__(self, eps: float = 1e-4) -> None:
        self.eps = checked_eps(eps)

    def __call__(self, rewards: NDArray[np.float64]) -> NDArray[np.float32]:
        """Return the advantages [B, G] of rewards [B, G]."""
        centred, count = _centred(rewards.reshape(1, -1))
        normalized = centred / (_deviation(centred, count) + self.eps)
        return normalized.reshape(rewards.shape).astype(np.float32)


def _centred(rewards: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return rewards minus row means (0 where failed), and the number of valid rewards per row."""
    valid = np.isfinite(rewards)
    count = valid.sum(axis=1, keepdims=True)
    mean = np.where(valid, rewards, 0.0).sum(axis=1, keepdims=True) / np.maximum(count, 1)
    return np.where(valid, rewards - mean, 0.0), count


def _deviation(centred: NDArray[np.float64], count: NDArray[np.int64]) -> NDArray[np.float64]:
    return np.sqrt((centred**2).sum(axis=1, keepdims=True) / np.maximum(count - 1, 1))


def checked_eps(eps: float) -> float:
    """Return `eps`; refuse one that is not above 0."""
    if not eps > 0:
        raise ConfigError("advantages.eps", f"{eps} given", "a number > 0")
    return eps
