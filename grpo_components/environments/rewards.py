"""Reward for environments that give rewards themselves; the last reply's `answer` is their sum."""

from __future__ import annotations

from typing import Any


class EnvironmentReward:
    """Sum of the rewards that the environment gave in a conversation.

    Use it with `GymnasiumWorld`.

    Args:
        max_reward: the largest possible sum; a conversation that reaches it is a success.
    """

    def __init__(self, max_reward: float = 1.0) -> None:
        self.max_reward = max_reward

    def __call__(self, *, answer: str, **_: Any) -> float:
        """Return the reward of one conversation."""
        try:
            return float(answer)
        except ValueError as error:
            problem = f"answer: {answer!r:.50} given"
            raise ValueError(f"{problem}; allowed: a number, as the world writes it") from error
