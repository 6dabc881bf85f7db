"""Rolls out groups, each with a torchrl environment in its own thread, a policy and a collector."""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from grpo_components.errors import ConfigError
from grpo_components.objective.component_errors import failure_text
from grpo_components.rewards.pool import NO_SCORE, RewardPool, RewardPoolError
from grpo_components.rollout.collector import EnginePolicy, GroupCollector
from grpo_components.rollout.engine import Engine, EngineStoppedError
from grpo_components.rollout.environment_thread import (
    EnvironmentThread,
    HungCallError,
    TimeLimit,
    hang_text,
)
from grpo_components.rollout.generator_options import EnvironmentOptions
from grpo_components.rollout.slots import Sample, SlotRollout
from grpo_components.settings import GeneratorSettings

_CLOSING_S = 5.0
"""Seconds for the environments to close; one that hangs ends with the process."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Seat:
    """What a rollout needs: an environment with its thread, a policy and a collector."""

    environment: EnvironmentThread
    env: Any
    policy: EnginePolicy
    collector: GroupCollector


class Rollouts:
    """Samples responses with the shared engine, and scores them."""

    def __init__(
        self,
        engine: Engine,
        rewards: RewardPool,
        settings: GeneratorSettings,
        environment: EnvironmentOptions,
        *,
        decode: Callable[[list[int]], str],
        encode: Callable[[str], list[int]],
    ) -> None:
        self._engine, self._rewards = engine, rewards
        self._settings, self._environment = settings, environment
        self._decode, self._encode = decode, encode
        self._free_seats: defaultdict[int, deque[_Seat]] = defaultdict(deque)
        """Seats that no rollout is using, by number of slots."""

    async def collect(self, samples: Sequence[Sample], temperature: float) -> list[SlotRollout]:
        """Sample and score responses, all of them in one environment."""
        with self._engine.use.rollout():
            try:
                return await self._rollout(samples, temperature)
            finally:
                for sample in samples:
                    sample.ended()

    async def _rollout(self, samples: Sequence[Sample], temperature: float) -> list[SlotRollout]:
        free = self._free_seats[len(samples)]
        seat = free.pop() if free else await self._seat(len(samples))
        seat.policy.samples, seat.policy.temperature = samples, temperature
        try:
            call = partial(seat.environment.run, TimeLimit(self._environment.timeout_s))
            await call(seat.env.ask, [sample.prompt for sample in samples])
            slots = await seat.collector.rollout(call)
            longest = max(len(slot.response_ids) for slot in slots)
            if longest > self._settings.max_response_tokens:
                limit = f"generator.max_response_tokens is {self._settings.max_response_tokens}"
                raise ValueError(f"the response has {longest} tokens, but {limit}")
        except (EngineStoppedError, RewardPoolError, ConfigError):
            raise
        except Exception as error:  # from a user's environment: these samples fail
            # The state of the environment is unknown, so the next group gets a new environment.
            seat.environment.leave(seat.env.close)
            problem = self._problem_of(error)
            prompts = (np.asarray(sample.prompt["prompt_ids"]) for sample in samples)
            slots = [SlotRollout.failed(prompt_ids, problem) for prompt_ids in prompts]
        else:
            free.append(seat)
        for sample, slot in zip(samples, slots, strict=True):
            if slot.score is not None and slot.score.error is not None:
                _log.error("%s failed: %s", sample.name, slot.score.error)
        return slots

    def _problem_of(self, error: Exception) -> str:
        """Return the error of a failed rollout, with the place in the user's code."""
        if not isinstance(error, HungCallError):
            return failure_text("environment", error)
        score = self._rewards.score.__code__
        if (score.co_filename, score.co_name) in {(f.filename, f.name) for f in error.stack}:
            return NO_SCORE
        return hang_text(error)

    async def _seat(self, num_slots: int) -> _Seat:
        environment = EnvironmentThread()
        build = partial(
            self._environment.build_environment,
            num_slots=num_slots,
            decode=self._decode,
            encode=self._encode,
            score=self._rewards,
            max_response_tokens=self._settings.max_response_tokens,
        )
        try:
            env = await environment.run(TimeLimit(self._environment.timeout_s), build)
        except Exception as error:  # from a user's environment
            if isinstance(error, TimeoutError):
                raise
            raise RuntimeError(failure_text("environment: cannot be built", error)) from error
        policy = EnginePolicy(self._engine, self._settings)
        return _Seat(environment, env, policy, GroupCollector(env, policy))

    def close(self) -> None:
        """Close the environments that no rollout is using."""
        seats = [seat for free in self._free_seats.values() for seat in free]
        wait([seat.environment.leave(seat.env.close) for seat in seats], _CLOSING_S)
