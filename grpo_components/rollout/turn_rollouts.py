"""Samples and scores single turns, and conversations with a `World` (see multi_turn.py)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from grpo_components.data.columns import reward_input
from grpo_components.errors import ConfigError
from grpo_components.objective.component_errors import failure_text
from grpo_components.rewards.pool import NO_SCORE, RewardPool, RewardPoolError, Score
from grpo_components.rollout.engine import Engine, EngineStoppedError, next_turn
from grpo_components.rollout.environment_thread import (
    EnvironmentThreads,
    HungCallError,
    TimeLimit,
    hang_text,
)
from grpo_components.rollout.generator_options import EnvironmentOptions
from grpo_components.rollout.multi_turn import Conversation, MultiTurnEnvironment
from grpo_components.rollout.samples import Sample, Scored, failure
from grpo_components.settings import GeneratorSettings

_SHOWN_CHARS = 500
"""Maximum characters of a response that its error message shows."""


class TurnRollouts:
    """Samples and scores a response to each prompt; a thread is used only while a world replies."""

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
        self._engine, self._rewards, self._settings = engine, rewards, settings
        self._environment, self._decode, self._encode = environment, decode, encode
        self._threads = EnvironmentThreads()
        self._free: deque[MultiTurnEnvironment] = deque()
        """Idle environments, without a conversation; a new one is built only if none is idle."""

    async def collect(self, samples: Sequence[Sample]) -> list[Scored]:
        """Sample and score these responses, all at once."""
        return await asyncio.gather(*(self._one(sample) for sample in samples))

    async def _one(self, sample: Sample) -> Scored:
        limit = TimeLimit(self._environment.timeout_s)
        try:
            if self._environment.kind == "single_turn":
                return await self._answered(sample, limit, None)
            return await self._conversation(sample, limit)
        except (EngineStoppedError, RewardPoolError, ConfigError):
            raise
        except HungCallError as error:
            return sample.failed(hang_text(error))
        except Exception as error:  # of a world, or a prompt that is too long: this sample fails
            return sample.failed(failure_text("environment", error))
        finally:
            sample.ended()

    async def _conversation(self, sample: Sample, limit: TimeLimit) -> Scored:
        call = partial(self._threads.call, limit)
        build = self._environment.build_environment
        environment = self._free.pop() if self._free else await call(build)
        begun = await call(Conversation, environment, sample.prompt, self._encode)
        scored = await self._answered(sample, limit, begun)
        self._free.append(environment)  # not after an error: its state is unknown
        return scored

    async def _answered(
        self, sample: Sample, limit: TimeLimit, conversation: Conversation | None
    ) -> Scored:
        settings, prompt_ids = self._settings, np.asarray(sample.prompt["prompt_ids"])
        tokens, turns = prompt_ids.tolist(), list[tuple[Any, ...]]()
        while True:
            used = len(tokens) - len(prompt_ids)
            asked = next_turn(self._engine, settings, sample, tokens, used)
            turn = await asyncio.wrap_future(asked)
            token_ids = turn.token_ids.tolist()
            turns.append((turn.token_ids, turn.logprobs, turn.token_versions))
            text, reply_ids = self._decode(token_ids), None
            if conversation is not None:
                room = settings.max_response_tokens - used - len(token_ids) - 1
                reply = conversation.take_turn, text, turn.finish_reason, room
                reply_ids = await self._threads.call(limit, *reply)
            if reply_ids is None:
                break
            turns.append((reply_ids,))
            tokens += token_ids + reply_ids
        finish_reason = conversation.finish_reason if conversation else turn.finish_reason
        answer = conversation and conversation.answer
        score = await self._score(sample, text, finish_reason, answer, limit)
        if score.error is not None:
            score = replace(score, error=f"{score.error}\nresponse: {text[:_SHOWN_CHARS]!r}")
        if conversation is not None:
            score = conversation.add_rewards(score)
        record = sample.record(prompt_ids, turns, finish_reason, score)
        return [record], score, None if conversation else text

    async def _score(
        self, sample: Sample, text: str, finish_reason: str, answer: str | None, limit: TimeLimit
    ) -> Score:
        async with sample.scoring:
            scoring = self._rewards.begin(reward_input(sample.prompt, text, finish_reason, answer))
            try:
                with limit.running() as left_s:
                    async with asyncio.timeout(left_s):
                        return await asyncio.wrap_future(scoring)
            except TimeoutError:
                return failure(NO_SCORE)

    def close(self) -> None:
        """Let the idle threads end."""
        self._threads.close()
