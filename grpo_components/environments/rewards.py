"""The reward of a conversation whose world gives it, as the `answer` of its replies."""

from __future__ import annotations

from typing import Any


class EnvironmentReward:
    """Sum of the rewards that the environment gave in a conversation.

    It goes with `GymnasiumWorld`.

    Args:
        max_reward: the largest sum, at which a conversation succeeds.
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
