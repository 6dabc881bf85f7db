"""Rolls out groups in torchrl environments, each of which runs in a thread of its own."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from tensordict import NonTensorData, TensorDict, lazy_stack
from torchrl.collectors import Collector
from torchrl.envs import EnvBase
from torchrl.envs.utils import step_mdp

from grpo_components.errors import ConfigError
from grpo_components.objective.component_errors import failure_text
from grpo_components.rewards.pool import NO_SCORE, RewardPool, RewardPoolError, Score
from grpo_components.rollout.engine import Engine, EngineStoppedError, next_turn
from grpo_components.rollout.environment_thread import (
    EnvironmentThread,
    HungCallError,
    TimeLimit,
    hang_text,
)
from grpo_components.rollout.generator_options import EnvironmentOptions
from grpo_components.rollout.samples import Completion, Sample, Scored
from grpo_components.settings import GeneratorSettings

_CLOSING_S = 5.0
"""Maximum seconds for closing the environments; one that hangs ends with the process."""
_NOTHING = Completion(np.empty(0, np.int64), np.empty(0, np.float32), np.empty(0, np.int32), "stop")


@dataclass
class _Slot:
    """State of one slot (batch row) of an environment: a sample, and the response to it so far."""

    sample: Sample
    prompt_ids: NDArray[np.int64]
    tokens: NDArray[np.int64]
    """Prompt and response so far."""
    turns: list[Sequence[Any]] = field(default_factory=list)
    scored: Scored | None = None
    """None until the response is done."""

    def extend(self, said: Completion, after: Any) -> None:
        """Append the policy's turn, and the tokens that the environment added after it."""
        tokens = after["tokens"].numpy().copy()
        known = np.concatenate([self.tokens, said.token_ids])
        if not np.array_equal(tokens[: len(known)], known):
            raise ValueError("the environment changed tokens of earlier turns")
        self.turns.append((said.token_ids, said.logprobs, said.token_versions))
        self.turns.append((tokens[len(known) :],))
        self.tokens = tokens
        # The environment's reason takes precedence: it knows limits that the policy does not.
        has_reason = "finish_reason" in after.keys()  # noqa: SIM118 -- of a TensorDict
        finish_reason = after["finish_reason"] if has_reason else said.finish_reason
        if bool(after["done"]):
            if not isinstance(score := after["score"], Score):
                raise TypeError(f"the environment ended a slot with score {score!r:.200}")
            record = self.sample.record(self.prompt_ids, self.turns, finish_reason, score)
            self.scored = [record], score, None


class GroupCollector(Collector):
    """torchrl collector that rolls out one sample in each slot of an environment; pads nothing."""

    def __init__(self, env: EnvBase, engine: Engine, settings: GeneratorSettings) -> None:
        self._engine, self._settings = engine, settings
        super().__init__(
            env,
            cast(Any, self._sample),  # torchrl itself never calls it
            frames_per_batch=env.batch_size[0],
            total_frames=-1,
            trust_policy=True,
            use_buffers=False,
            no_cuda_sync=True,
            track_traj_ids=False,
        )

    # torchrl's own method would reset the environment and call the policy during construction.
    def _make_carrier(self) -> None:
        self._carrier = TensorDict(batch_size=self.env.batch_size)
        self._carrier_has_no_device = True

    def _maybe_make_final_rollout(self, make_rollout: bool) -> None:
        self._use_buffers = False

    async def rollout(
        self, samples: Sequence[Sample], call: Callable[..., Awaitable[Any]]
    ) -> list[Scored]:
        """Roll out one sample per slot; `call` runs a function in the environment's thread."""
        await call(cast(Any, self.env).ask, [sample.prompt for sample in samples])
        tensordict = await call(self.env.reset)
        prompts = [state["tokens"].numpy().copy() for state in tensordict.unbind(0)]
        slots = [_Slot(*each) for each in zip(samples, prompts, prompts, strict=True)]
        while not all(slot.scored for slot in slots):
            turns, states = await self._sample(slots), tensordict.unbind(0)
            for state, turn in zip(states, turns, strict=True):
                reason = NonTensorData(turn.finish_reason)
                state.update(TensorDict(response=turn.token_ids, finish_reason=reason))
            tensordict = await call(self.env.step, lazy_stack(list(states), 0))
            for slot, turn, state in zip(slots, turns, tensordict.unbind(0), strict=True):
                if slot.scored is None:
                    slot.extend(turn, state["next"])
            tensordict = step_mdp(tensordict)
        return [cast(Scored, slot.scored) for slot in slots]

    async def _sample(self, slots: Sequence[_Slot]) -> list[Completion]:
        """Sample the next turn of every slot; a slot that is done gets an empty one."""
        futures = [None if slot.scored else self._submit(slot) for slot in slots]
        return [await asyncio.wrap_future(each) if each else _NOTHING for each in futures]

    def _submit(self, slot: _Slot) -> Future[Completion]:
        used, most = len(slot.tokens) - len(slot.prompt_ids), self._settings.max_response_tokens
        if used >= most:
            limit = f"generator.max_response_tokens is {most}"
            raise ValueError(f"the response has not ended after {used} tokens, but {limit}")
        return next_turn(self._engine, self._settings, slot.sample, slot.tokens.tolist(), used)


class CollectedRollouts:
    """Samples and scores groups in torchrl environments, each of which has its own thread."""

    def __init__(
        self,
        engine: Engine,
        rewards: RewardPool,
        settings: GeneratorSettings,
        environment: EnvironmentOptions,
        **texts: Callable[..., Any],
    ) -> None:
        self._engine, self._rewards = engine, rewards
        self._settings, self._environment = settings, environment
        self._texts = texts
        """The functions `decode` and `encode`, for the environments."""
        self._free: defaultdict[int, deque[tuple[EnvironmentThread, GroupCollector]]]
        self._free = defaultdict(deque)
        """Idle threads, each with its collector, by number of slots."""

    async def collect(self, samples: Sequence[Sample]) -> list[Scored]:
        """Sample and score responses, all of them in one environment."""
        free = self._free[len(samples)]
        thread, collector = free.pop() if free else await self._build(len(samples))
        try:
            call = partial(thread.run, TimeLimit(self._environment.timeout_s))
            scored = await collector.rollout(samples, call)
            longest = max(len(each.response_ids) for (each,), *_ in scored)
            if longest > self._settings.max_response_tokens:
                limit = f"generator.max_response_tokens is {self._settings.max_response_tokens}"
                raise ValueError(f"the response has {longest} tokens, but {limit}")
        except (EngineStoppedError, RewardPoolError, ConfigError):
            raise
        except Exception as error:  # from a user's environment: these samples fail
            # The state of the environment is unknown, so the next group gets a new environment.
            thread.leave(collector.env.close)
            problem = self._problem_of(error)
            return [sample.failed(problem) for sample in samples]
        free.append((thread, collector))
        return scored

    def _problem_of(self, error: Exception) -> str:
        """Return the error message of a failed rollout, with the place in the user's code."""
        if not isinstance(error, HungCallError):
            return failure_text("environment", error)
        score = self._rewards.__call__.__code__
        if (score.co_filename, score.co_name) in {(f.filename, f.name) for f in error.stack}:
            return NO_SCORE
        return hang_text(error)

    async def _build(self, num_slots: int) -> tuple[EnvironmentThread, GroupCollector]:
        thread = EnvironmentThread()
        build = partial(
            self._environment.build_environment,
            num_slots=num_slots,
            score=self._rewards,
            max_response_tokens=self._settings.max_response_tokens,
            **self._texts,
        )
        try:
            env = await thread.run(TimeLimit(self._environment.timeout_s), build)
        except Exception as error:  # from a user's environment
            if isinstance(error, TimeoutError):
                raise
            raise RuntimeError(failure_text("environment: cannot be built", error)) from error
        return thread, GroupCollector(env, self._engine, self._settings)

    def close(self) -> None:
        """Close the idle environments."""
        free = [each for ends in self._free.values() for each in ends]
        wait([thread.leave(collector.env.close) for thread, collector in free], _CLOSING_S)
