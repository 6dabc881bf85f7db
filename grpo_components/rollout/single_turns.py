"""Rolls out single turns without threads: each response is scored as soon as it is sampled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from grpo_components.data.columns import reward_input
from grpo_components.errors import ConfigError
from grpo_components.objective.component_errors import failure_text
from grpo_components.rewards.pool import RewardPool, RewardPoolError
from grpo_components.rollout.engine import Engine, EngineStoppedError
from grpo_components.rollout.generator_options import EnvironmentOptions
from grpo_components.rollout.slots import Sample, SlotRollout
from grpo_components.settings import GeneratorSettings

_log = logging.getLogger(__name__)


class SingleTurns:
    """Samples and scores one turn for each prompt, in the event loop of the caller."""

    def __init__(
        self,
        engine: Engine,
        rewards: RewardPool,
        settings: GeneratorSettings,
        environment: EnvironmentOptions,
        decode: Callable[[list[int]], str],
    ) -> None:
        self._engine, self._rewards, self._settings = engine, rewards, settings
        self._timeout_s, self._decode = environment.timeout_s, decode

    async def collect(self, samples: Sequence[Sample], temperature: float) -> list[SlotRollout]:
        """Sample and score responses."""
        with self._engine.use.rollout():
            return await asyncio.gather(*(self._one(sample, temperature) for sample in samples))

    async def _one(self, sample: Sample, temperature: float) -> SlotRollout:
        prompt_ids = np.asarray(sample.prompt["prompt_ids"])
        try:
            slot = await self._answered(sample, prompt_ids, temperature)
        except (EngineStoppedError, RewardPoolError, ConfigError):
            raise
        except Exception as error:  # for example a prompt that is too long: this sample fails
            slot = SlotRollout.failed(prompt_ids, failure_text("environment", error))
        finally:
            sample.ended()
        assert slot.score is not None
        if slot.score.error is not None:
            _log.error("%s failed: %s", sample.name, slot.score.error)
        return slot

    async def _answered(
        self, sample: Sample, prompt_ids: NDArray[np.int64], temperature: float
    ) -> SlotRollout:
        settings = self._settings
        asked = self._engine.submit(
            prompt_ids.tolist(),
            max_tokens=settings.max_response_tokens,
            temperature=temperature,
            seed=sample.seed,
            stop_token_ids=settings.stop_token_ids or (),
            truncation=settings.truncation,
            name=sample.name,
        )
        turn = await asyncio.wrap_future(asked)
        text = self._decode(turn.token_ids.tolist())
        scoring = self._rewards.begin(reward_input(sample.prompt, text, turn.finish_reason))
        try:
            async with asyncio.timeout(self._timeout_s):
                score = await asyncio.wrap_future(scoring)
        except TimeoutError:
            problem = f"no score within the environment's limit: {self._rewards.late()}"
            return SlotRollout.failed(prompt_ids, f"rewards: {problem}")
        return SlotRollout.of_turn(prompt_ids, turn, text, score)

    def close(self) -> None:
        """Do nothing: there is no thread."""
