"""The reward that a world of this room gives a conversation."""

from __future__ import annotations

import math


def reward_as_answer(total: float) -> str:
    """Return the reward of a conversation as the `answer` of a `Reply`, for `EnvironmentReward`."""
    if not math.isfinite(total):
        raise ValueError(f"the environment gave rewards whose sum is {total}")
    return repr(float(total))


class EnvironmentReward:
    """Sum of the rewards that the environment gave in a conversation.

    It goes with `GymnasiumWorld`.

    Args:
        max_reward: the largest sum, at which a conversation succeeds.
    """

    def __init__(self, max_reward: float = 1.0) -> None:
        self.max_reward = max_reward

    def __call__(
        self, *, prompt_text: str, response_text: str, answer: str, finish_reason: str
    ) -> float:
        """Return the reward of one conversation."""
        try:
            return float(answer)
        except ValueError as error:
            problem = f"answer: {answer!r:.50} given"
            raise ValueError(f"{problem}; allowed: a number, as the world writes it") from error
