"""Rewards that an agent gives itself, and the component that adds them to a run's rewards."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any


def checked_reward(value: Any) -> dict[str, float] | None:
    """Check an agent's reward; return numbers by name (`reward` for a single one), or None."""
    if value is None:
        return None
    named = value if isinstance(value, Mapping) else {"reward": value}
    if not all(isinstance(name, str) and _is_finite(number) for name, number in named.items()):
        allowed = "a finite number, or such numbers by name"
        raise ValueError(f"the agent's reward is {value!r:.100}; allowed: {allowed}")
    return {name: float(number) for name, number in named.items()}


def _is_finite(number: Any) -> bool:
    return isinstance(number, int | float) and abs(number) <= sys.float_info.max


class AgentReward:
    """Reward that the agent returned or posted.

    Args:
        name: name of the reward to take, if the agent gives several.
        max_reward: the largest reward; a response that gets it counts as a success.
    """

    def __init__(self, name: str = "reward", max_reward: float = 1.0) -> None:
        self._name, self.max_reward = name, max_reward

    def __call__(self, *, agent_reward: Mapping[str, float] | None = None, **_: Any) -> float:
        """Return the reward of one session."""
        if agent_reward is None or self._name not in agent_reward:
            given = "none" if agent_reward is None else ", ".join(agent_reward)
            problem = f"the agent gave no reward named {self._name}; it gave: {given}"
            raise ValueError(f"{problem}; allowed: an AgentEnvironment whose agent gives it")
        return agent_reward[self._name]
