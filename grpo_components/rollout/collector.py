"""A torchrl collector that rolls out one group at a time with the shared engine."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, as_completed
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import NonTensorData, TensorDict, TensorDictBase, lazy_stack
from torchrl.collectors import Collector
from torchrl.envs import EnvBase
from torchrl.envs.utils import step_mdp

from grpo_components.agents.conversation import SessionPart
from grpo_components.rewards.pool import Score
from grpo_components.rollout.vllm_engine import Completion, VLLMEngine
from grpo_components.trajectory import Trajectory

Prompt = dict[str, Any]

_NOTHING = Completion(np.empty(0, np.int64), np.empty(0, np.float32), np.empty(0, np.int32), "stop")


def sampling_seed(*identity: int) -> int:
    """Return a sample's seed, computed from its identity (seed, purpose, group, sample) only."""
    return int(np.random.SeedSequence(identity).generate_state(1, np.uint64)[0] >> 1)


class EnginePolicy:
    """Policy of a collector: samples the next turn of every slot with the shared engine."""

    def __init__(
        self,
        engine: VLLMEngine,
        *,
        max_response_tokens: int,
        stop_token_ids: Sequence[int],
        truncation: Mapping[str, float],
    ) -> None:
        self._max_response_tokens = max_response_tokens
        self._submit = partial(
            engine.submit,
            stop_token_ids=stop_token_ids,
            truncation=truncation,
        )
        self.seeds: list[int] = []
        """Sampling seeds of the next rollout, one per slot."""
        self.names: list[str] = []
        """Names of the samples in the engine's schedule, one per slot."""
        self.temperature = 1.0
        """Sampling temperature of the next rollout."""
        self.on_sampled: Callable[[int, list[int], str], None] | None = None
        """Function called with slot, token ids and finish reason when a slot's turn is sampled."""

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write `response`, `logprobs`, `versions` and `finish_reason` into every slot.

        A slot that is done gets an empty response.
        """
        slots = tensordict.unbind(0)
        futures = [
            None if slot["done"] else self._sample(slot, name, seed)
            for slot, name, seed in zip(slots, self.names, self.seeds, strict=True)
        ]
        if self.on_sampled:
            numbers = {future: number for number, future in enumerate(futures) if future}
            for future in as_completed(numbers):
                turn = future.result()
                self.on_sampled(numbers[future], turn.token_ids.tolist(), turn.finish_reason)
        for slot, future in zip(slots, futures, strict=True):
            completion = _NOTHING if future is None else future.result()
            slot.update(
                TensorDict(
                    response=completion.token_ids,
                    logprobs=completion.logprobs,
                    versions=completion.token_versions,
                    finish_reason=NonTensorData(completion.finish_reason),
                )
            )
        return lazy_stack(list(slots), 0)

    def _sample(self, slot: TensorDictBase, name: str, seed: int) -> Future[Completion]:
        used = int(slot["response_tokens"])
        left = self._max_response_tokens - used
        if left < 1:
            limit = f"generator.max_response_tokens is {self._max_response_tokens}"
            raise ValueError(f"the response has not ended after {used} tokens, but {limit}")
        return self._submit(
            slot["tokens"].tolist(),
            max_tokens=left,
            name=name,
            # A later turn must not repeat the random numbers of the first.
            seed=sampling_seed(seed, used) if used else seed,
            temperature=self.temperature,
        )


def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


class GroupCollector(Collector):
    """A torchrl collector whose rollout takes all slots to their end, without padding them."""

    def __init__(self, env: EnvBase, policy: EnginePolicy) -> None:
        super().__init__(
            env,
            policy,
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

    def rollout(self, call: Callable[..., Any] = _call) -> list[SlotRollout]:
        """Reset the environment and step it until every slot is done."""
        tensordict = call(self.env.reset)
        slots = [SlotRollout(slot["tokens"].numpy()) for slot in tensordict.unbind(0)]
        while not all(slot.done for slot in slots):
            for slot, state in zip(slots, tensordict.unbind(0), strict=True):
                state["response_tokens"] = torch.tensor(len(slot.response_ids))
            tensordict = call(self.env.step, self.policy(tensordict))
            for slot, before in zip(slots, tensordict.unbind(0), strict=True):
                if not slot.done:
                    slot.extend(before)
            tensordict = step_mdp(tensordict)
        return slots


class SlotRollout:
    """Joins the turns of one slot into one response."""

    def __init__(self, prompt_ids: NDArray[np.int64]) -> None:
        self.prompt_ids = prompt_ids
        self.response_ids = np.empty(0, np.int64)
        self.response_mask = np.empty(0, np.bool_)
        self.logprobs = np.empty(0, np.float32)
        self.versions = np.empty(0, np.int32)
        self.finish_reason = ""
        self.score: Score | None = None
        self.done = False
        self.session: dict[str, Any] | None = None
        """What the record says of an agent's session; None without an agent."""
        self.others: list[SlotRollout] = []
        """Further trajectories of the session."""

    @classmethod
    def failed(cls, prompt_ids: NDArray[np.int64], error: str) -> SlotRollout:
        """Make the slot of a rollout that failed: a failed sample without response tokens."""
        slot = cls(prompt_ids)
        slot.finish_reason, slot.done = "error", True
        slot.score = Score(math.nan, {}, False, error)
        return slot

    @classmethod
    def of_session(cls, part: SessionPart, score: Score, session: dict[str, Any]) -> SlotRollout:
        """Make a slot of one trajectory of an agent's session."""
        slot = cls(part.prompt_ids)
        slot.response_ids, slot.response_mask = part.response_ids, part.response_mask
        slot.logprobs, slot.versions = part.logprobs, part.versions
        slot.finish_reason, slot.score, slot.done = part.finish_reason, score, True
        slot.session = session
        return slot

    def extend(self, turn: Any) -> None:
        """Append one turn of the policy and the environment's tokens after it."""
        after = turn["next"]
        response = turn["response"].numpy()
        known = np.concatenate([self.prompt_ids, self.response_ids, response])
        if not np.array_equal(after["tokens"].numpy()[: len(known)], known):
            raise ValueError("the environment changed tokens of earlier turns")
        added = after["tokens"].numpy()[len(known) :]
        self.response_ids = np.concatenate([self.response_ids, response, added])
        self.response_mask = np.concatenate(
            [self.response_mask, np.ones(len(response), bool), np.zeros(len(added), bool)]
        )
        self.logprobs = np.concatenate(
            [self.logprobs, turn["logprobs"].numpy(), np.zeros(len(added), np.float32)]
        )
        self.versions = np.concatenate(
            [self.versions, turn["versions"].numpy(), np.full(len(added), -1, np.int32)]
        )
        # The environment's reason takes precedence: it knows limits that the policy does not.
        has_reason = "finish_reason" in after.keys()  # noqa: SIM118 -- of a TensorDict
        self.finish_reason = (after if has_reason else turn)["finish_reason"]
        self.done = bool(after["done"])
        if self.done:
            self.score = after["score"]
            if not isinstance(self.score, Score):
                raise TypeError(f"the environment ended a slot with score {self.score!r:.200}")
            if self.score.error is None and not math.isfinite(self.score.reward):
                why = f"the environment gave the reward {self.score.reward}"
                self.score = Score(math.nan, {}, False, why)

    def trajectory(
        self, prompt: Prompt, *, epoch: int, group_id: int, attempt: int, temperature: float
    ) -> Trajectory:
        """Convert the slot to a `Trajectory`; if it failed, the finish_reason is `error`."""
        assert self.score is not None, "the slot is not done"
        trajectory = Trajectory(
            prompt_ids=self.prompt_ids,
            response_ids=self.response_ids,
            response_mask=self.response_mask,
            generator_logprobs=self.logprobs,
            token_versions=self.versions,
            prompt_index=prompt["prompt_index"],
            epoch=epoch,
            group_id=group_id,
            attempt=attempt,
            temperature=temperature,
            finish_reason="error" if self.score.error else self.finish_reason,  # pyright: ignore
            reward=self.score.reward,
            reward_terms=self.score.terms,
            success=self.score.success,
            error=self.score.error,
            session=self.session,
        )
        trajectory.check()
        return trajectory


def reward_use(slots: Iterable[SlotRollout]) -> dict[str, float]:
    """Add up what the rewards used for some responses, see `Score.used`."""
    total: Counter[str] = Counter()
    for slot in slots:
        total.update(slot.score.used if slot.score else {})  # pyright: ignore -- numbers
    return dict(total)
