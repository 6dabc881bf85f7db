"""Opens what rolls out responses: collectors that step environments, or a server for agents."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from grpo_components.rewards.pool import RewardPool
from grpo_components.rollout.generator_options import (
    EngineOptions,
    EnvironmentOptions,
    SamplingOptions,
)
from grpo_components.rollout.rollouts import Rollouts
from grpo_components.rollout.vllm_engine import VLLMEngine

if TYPE_CHECKING:
    from grpo_components.rollout.agent_rollouts import AgentRollouts


def open_rollouts(
    engine: VLLMEngine,
    rewards: RewardPool,
    sampling: SamplingOptions,
    environment: EnvironmentOptions,
    engine_options: EngineOptions,
    *,
    decode: Callable[[list[int]], str],
    encode: Callable[[str], list[int]],
    threads: int,
) -> Rollouts | AgentRollouts:
    """Open the rollouts of a generator."""
    shared = engine, rewards, sampling, environment
    if not environment.runs_agents:
        return Rollouts(*shared, decode=decode, encode=encode, threads=threads)
    from grpo_components.rollout.agent_rollouts import AgentRollouts  # imports a web server

    return AgentRollouts(*shared, engine_options)
