"""A torchrl collector that rolls out one group at a time with the shared engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from typing import Any, cast

import numpy as np
import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, lazy_stack
from torchrl.collectors import Collector
from torchrl.envs import EnvBase
from torchrl.envs.utils import step_mdp

from grpo_components.rewards.pool import Score
from grpo_components.rollout.completions import Completion
from grpo_components.rollout.engine import Engine
from grpo_components.rollout.slots import Sample, SlotRollout, next_turn
from grpo_components.settings import GeneratorSettings

_NOTHING = Completion(np.empty(0, np.int64), np.empty(0, np.float32), np.empty(0, np.int32), "stop")


class EnginePolicy:
    """Policy of a collector: samples the next turn of every slot with the shared engine."""

    def __init__(self, engine: Engine, settings: GeneratorSettings) -> None:
        self._engine, self._settings = engine, settings
        self.samples: Sequence[Sample] = ()
        """Samples of the next rollout, one per slot."""
        self.temperature = 1.0
        """Sampling temperature of the next rollout."""

    async def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write `response`, `logprobs`, `versions` and `finish_reason` into every slot.

        A slot that is done gets an empty response.
        """
        slots = tensordict.unbind(0)
        futures = [
            None if slot["done"] else self._sample(slot, sample)
            for slot, sample in zip(slots, self.samples, strict=True)
        ]
        for slot, future in zip(slots, futures, strict=True):
            completion = _NOTHING if future is None else await asyncio.wrap_future(future)
            slot.update(
                TensorDict(
                    response=completion.token_ids,
                    logprobs=completion.logprobs,
                    versions=completion.token_versions,
                    finish_reason=NonTensorData(completion.finish_reason),
                )
            )
        return lazy_stack(list(slots), 0)

    def _sample(self, slot: TensorDictBase, sample: Sample) -> Future[Completion]:
        used, most = int(slot["response_tokens"]), self._settings.max_response_tokens
        if used >= most:
            limit = f"generator.max_response_tokens is {most}"
            raise ValueError(f"the response has not ended after {used} tokens, but {limit}")
        tokens = slot["tokens"].tolist()
        return next_turn(self._engine, self._settings, sample, self.temperature, tokens, used)


def _extend(slot: SlotRollout, turn: Any) -> None:
    """Append one step: the policy's turn, and the tokens that the environment added after it."""
    after = turn["next"]
    response, tokens = turn["response"].numpy(), after["tokens"].numpy()
    known = np.concatenate([slot.prompt_ids, slot.response_ids, response])
    if not np.array_equal(tokens[: len(known)], known):
        raise ValueError("the environment changed tokens of earlier turns")
    # The environment's reason takes precedence: it knows limits that the policy does not.
    has_reason = "finish_reason" in after.keys()  # noqa: SIM118 -- of a TensorDict
    reason = (after if has_reason else turn)["finish_reason"]
    said = Completion(response, turn["logprobs"].numpy(), turn["versions"].numpy(), reason)
    slot.extend(said, tokens[len(known) :])
    if bool(after["done"]):
        if not isinstance(score := after["score"], Score):
            raise TypeError(f"the environment ended a slot with score {score!r:.200}")
        slot.end(score)


class GroupCollector(Collector):
    """A torchrl collector whose rollout steps all slots until each is done, without padding."""

    def __init__(self, env: EnvBase, policy: EnginePolicy) -> None:
        self._turns = policy
        super().__init__(
            env,
            cast(Any, policy),  # torchrl itself never calls it
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

    async def rollout(self, call: Callable[..., Awaitable[Any]]) -> list[SlotRollout]:
        """Reset the environment and step it, in its own thread, until every slot is done."""
        tensordict = await call(self.env.reset)
        slots = [SlotRollout(slot["tokens"].numpy()) for slot in tensordict.unbind(0)]
        while not all(slot.done for slot in slots):
            for slot, state in zip(slots, tensordict.unbind(0), strict=True):
                state["response_tokens"] = torch.tensor(len(slot.response_ids))
            tensordict = await call(self.env.step, await self._turns(tensordict))
            for slot, before in zip(slots, tensordict.unbind(0), strict=True):
                if not slot.done:
                    _extend(slot, before)
            tensordict = step_mdp(tensordict)
        return slots
