"""The generator: samples groups with vLLM inside torchrl collectors, and scores them."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grpo_components.exchange.weights import Manifest, snapshot_checksum, unpack_buckets
from grpo_components.objective.component_errors import (
    ComponentError,
    failure_text,
    place_in,
    stack_text,
    users_part,
)
from grpo_components.replay.schedule import open_schedule
from grpo_components.rewards.pool import RewardPool, RewardPoolError
from grpo_components.rollout.collector import (
    EnginePolicy,
    GroupCollector,
    Prompt,
    SlotRollout,
    sampling_seed,
)
from grpo_components.rollout.environment_thread import EnvironmentThread, HungCallError
from grpo_components.rollout.generator_options import (
    EngineOptions,
    EnvironmentOptions,
    ReplayOptions,
    RewardOptions,
    SamplingOptions,
)
from grpo_components.rollout.observation_text import encode_text
from grpo_components.rollout.token_texts import token_texts
from grpo_components.rollout.vllm_engine import BASE_VERSION, EngineStoppedError, VLLMEngine
from grpo_components.trajectory import GroupSummary, PackedTrajectories, Trajectory, pack, summarize

_REPLAY_THREADS = 1000
"""Number of threads in a replay: its calls come in any order, and none may block another."""
_CLOSING_S = 5.0
"""Seconds for the environments to close; one that hangs ends with the process."""
_SWITCH_S = 0.0005
"""Seconds that a thread may keep the GIL while another wants it."""
_NO_REPLAY = ReplayOptions()
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Seat:
    """What a rollout needs: an environment with its thread, a policy and a collector."""

    environment: EnvironmentThread
    env: Any
    policy: EnginePolicy
    collector: GroupCollector


class Generator:
    """Samples and scores groups, with one engine, its collectors and its reward processes.

    Args:
        build_tokenizer: function that builds the torchtune tokenizer.
        engine: options of the vLLM engine.
        sampling: options of sampling.
        environment: options of the environment in which prompts are answered.
        rewards: options of the rewards.
        rollouts_in_flight: number of groups generated at once.
        log_token_texts: whether the readable form of a group contains the text of each token.
        replay: options of recording and replaying the engine's schedule.
        number: number of this generator, counted from 0.
        restart_count: number of times that this generator's process was restarted so far.
    """

    def __init__(
        self,
        *,
        build_tokenizer: Callable[[], Any],
        engine: EngineOptions,
        sampling: SamplingOptions,
        environment: EnvironmentOptions,
        rewards: RewardOptions,
        rollouts_in_flight: int,
        log_token_texts: bool = False,
        replay: ReplayOptions = _NO_REPLAY,
        number: int = 0,
        restart_count: int = 0,
    ) -> None:
        # At Python's 5 ms, collectors' threads hold up each engine step that waits for the GIL.
        sys.setswitchinterval(_SWITCH_S)
        self._rewards = RewardPool(
            rewards.rewards, num_workers=rewards.num_workers, timeout_s=rewards.timeout_s
        )
        self._tokenizer = build_tokenizer()
        self._sampling, self._environment = sampling, environment
        self._stop_token_ids = set(sampling.stop_token_ids)
        schedule = open_schedule(
            number, replay.schedule_folder, replay.replayed_folder, replay.timeout_s, restart_count
        )
        self._engine = VLLMEngine(engine, seed=sampling.seed, schedule=schedule)
        self._log_token_texts = log_token_texts
        threads = rollouts_in_flight if replay.replayed_folder is None else _REPLAY_THREADS
        threads *= sampling.group_size if environment.slots_apart else 1
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="collector")
        self._free_seats: defaultdict[int, deque[_Seat]] = defaultdict(deque)
        """Seats that no rollout is using, by number of slots."""
        self.version = self._loading = BASE_VERSION

    async def generate_group(
        self, prompt: Prompt, epoch: int, group_id: int, attempt: int, temperature: float
    ) -> tuple[PackedTrajectories, GroupSummary, dict[str, Any]]:
        """Sample and score `group_size` responses to one prompt.

        Args:
            prompt: row of the prompt data set.
            epoch: number of the pass over the data set.
            group_id: number of the group. The run's seed, this number and the number of a sample
                determine its sampling seed.
            attempt: number of times that the run was started or resumed.
            temperature: sampling temperature.

        Returns:
            The packed group, its summary, and its readable form for the rollout log.
        """
        seed, group_size = self._sampling.seed, self._sampling.group_size
        prompts = [
            {**prompt, "seed": sampling_seed(seed, 2, group_id, i)} for i in range(group_size)
        ]
        seeds = [sampling_seed(seed, 0, group_id, i) for i in range(group_size)]
        names = [f"group {group_id} sample {i}" for i in range(group_size)]
        slots = await self._collect(prompts, names, seeds, temperature)
        identity = {"epoch": epoch, "group_id": group_id, "attempt": attempt}
        group = [slot.trajectory(prompt, **identity, temperature=temperature) for slot in slots]
        text = {
            "prompt_index": prompt["prompt_index"],
            "epoch": epoch,
            "prompt": prompt["prompt_text"],
            "answer": prompt["answer"],
            "responses": [self._readable(t, token_texts_too=self._log_token_texts) for t in group],
        }
        packed = pack(group)
        return packed, summarize(packed), text

    async def evaluate(
        self,
        prompts: Sequence[Prompt],
        temperature: float,
        samples: int = 1,
        logged: Sequence[int] = (),
    ) -> list[dict[str, Any]]:
        """Sample and score responses to each prompt, with the same seeds in every evaluation.

        Args:
            prompts: rows of the evaluation data set.
            temperature: sampling temperature; 0 always takes the likeliest token.
            samples: number of responses to each prompt.
            logged: positions of the prompts whose responses are returned in readable form too.

        Returns:
            For each response, in the order of the prompts: prompt_index, prompt_text, reward,
            success, error, oldest_version, newest_version; for logged prompts also answer and
            `readable`, which is as in the rollout log.
        """
        seed, size = self._sampling.seed, self._sampling.group_size
        # All samples of a prompt get the same environment seed.
        asked = [
            ({**prompt, "seed": sampling_seed(seed, 3, prompt["prompt_index"])}, sample)
            for prompt in prompts
            for sample in range(samples)
        ]
        chunks = [asked[i : i + size] for i in range(0, len(asked), size)]

        def name(prompt: Prompt, sample: int) -> str:
            # The first sample's name does not depend on `samples`.
            which = f" sample {sample}" if sample else ""
            return f"evaluation of prompt {prompt['prompt_index']}{which}"

        rollouts = await asyncio.gather(
            *(
                self._collect(
                    [prompt for prompt, _ in chunk],
                    [name(prompt, i) for prompt, i in chunk],
                    [sampling_seed(seed, 1, p["prompt_index"], i) for p, i in chunk],
                    temperature,
                )
                for chunk in chunks
            )
        )
        slots = [slot for slots in rollouts for slot in slots]
        texts = {i * samples + sample for i in logged for sample in range(samples)}
        return [
            self._evaluated(prompt, slot, temperature if i in texts else None)
            for i, ((prompt, _), slot) in enumerate(zip(asked, slots, strict=True))
        ]

    async def load_weights(
        self, version: int, *buckets: tuple[Manifest, NDArray[np.uint8]]
    ) -> tuple[int, str]:
        """Check new weights, then swap them in between two engine steps.

        Args:
            version: policy version of the weights.
            buckets: the tensors of each trainer rank, as a manifest and packed bytes.

        Returns:
            The version and the checksum of all loaded tensors, to acknowledge them.

        Raises:
            ValueError: a tensor is damaged, missing, repeated, unknown or of the wrong shape (the
                message names it), or the version is older than the loaded one. The engine keeps its
                weights.
        """
        tensors = await asyncio.to_thread(unpack_buckets, buckets)
        # Newer weights may have arrived during the await. From this check to the update of
        # `_loading`, there must be no other await.
        if version < self._loading:
            raise ValueError(f"weights of version {version} came after those of {self._loading}")
        loading = self._engine.load_weights(version, tensors)
        self._loading = version
        await asyncio.wrap_future(loading)
        self.version = version
        return version, snapshot_checksum(manifest for manifest, _ in buckets)

    def begin_attempt(self) -> None:
        """Accept weights older than the loaded ones, because the run returns to a checkpoint."""
        self._loading = BASE_VERSION

    def time_use(self) -> dict[str, Any]:
        """Return the seconds of each activity of the engine, and its mean share of sequences."""
        use = self._engine.use
        return {"seconds": use.seconds(), "sequence_share": use.sequence_share()}

    def close(self) -> None:
        """Stop the engine, the reward processes and the environments."""
        self._engine.close()
        self._rewards.close()
        self._threads.shutdown(cancel_futures=True)
        seats = [seat for free in self._free_seats.values() for seat in free]
        wait([seat.environment.leave(seat.env.close) for seat in seats], _CLOSING_S)

    async def _collect(
        self, prompts: Sequence[Prompt], names: list[str], seeds: list[int], temperature: float
    ) -> list[SlotRollout]:
        size = 1 if self._environment.slots_apart else len(prompts)
        parts = [slice(start, start + size) for start in range(0, len(prompts), size)]
        run = partial(asyncio.get_running_loop().run_in_executor, self._threads)
        with self._engine.use.rollout():
            rollouts = await asyncio.gather(
                *(
                    run(self._collect_in_thread, prompts[p], names[p], seeds[p], temperature)
                    for p in parts
                )
            )
        return [slot for slots in rollouts for slot in slots]

    def _collect_in_thread(
        self, prompts: Sequence[Prompt], names: list[str], seeds: list[int], temperature: float
    ) -> list[SlotRollout]:
        free = self._free_seats[len(prompts)]
        try:
            seat = free.pop()
        except IndexError:
            seat = self._seat(len(prompts))
        seat.policy.names, seat.policy.seeds = names, seeds
        seat.policy.temperature = temperature
        try:
            seat.environment.begin()
            seat.environment.call(seat.env.ask, prompts)
            slots = seat.collector.rollout(seat.environment.call)
            longest = max(len(slot.response_ids) for slot in slots)
            if longest > self._sampling.max_response_tokens:
                limit = f"generator.max_response_tokens is {self._sampling.max_response_tokens}"
                raise ValueError(f"the response has {longest} tokens, but {limit}")
        except (EngineStoppedError, RewardPoolError, ComponentError):
            raise
        except Exception as error:  # from a user's environment: these samples fail
            # The state of the environment is unknown, so the next group gets a new environment.
            seat.environment.leave(seat.env.close)
            problem = self._problem_of(error)
            slots = [SlotRollout.failed(np.asarray(p["prompt_ids"]), problem) for p in prompts]
        else:
            free.append(seat)
        for name, slot in zip(names, slots, strict=True):
            if slot.score is not None and slot.score.error is not None:
                _log.error("%s failed: %s", name, slot.score.error)
        return slots

    def _problem_of(self, error: Exception) -> str:
        """Return what failed in a rollout, with the place in the user's code."""
        if not isinstance(error, HungCallError):
            return failure_text("environment", error)
        score = self._rewards.score.__code__
        if (score.co_filename, score.co_name) in {(f.filename, f.name) for f in error.stack}:
            return f"rewards: no score within the environment's limit: {self._rewards.late()}"
        stack = users_part(error.stack)
        problem = f"environment: TimeoutError{place_in(stack)}: {error}"
        return f"{problem}\n{stack_text(stack)}".strip()

    def _seat(self, num_slots: int) -> _Seat:
        environment = EnvironmentThread(self._environment.timeout_s)
        build = partial(
            self._environment.build_environment,
            num_slots=num_slots,
            decode=self._decode,
            encode=partial(encode_text, self._tokenizer),
            score=self._rewards,
            max_response_tokens=self._sampling.max_response_tokens,
        )
        try:
            env = environment.call(build)
        except Exception as error:  # from a user's environment
            if isinstance(error, TimeoutError):
                raise
            raise RuntimeError(failure_text("environment: cannot be built", error)) from error
        policy = EnginePolicy(
            self._engine,
            max_response_tokens=self._sampling.max_response_tokens,
            stop_token_ids=self._sampling.stop_token_ids,
            truncation=self._sampling.truncation,
        )
        policy.on_sampled = getattr(env, "begin_scoring", None)
        return _Seat(environment, env, policy, GroupCollector(env, policy))

    def _evaluated(
        self, prompt: Prompt, slot: SlotRollout, temperature: float | None
    ) -> dict[str, Any]:
        """Return the result of one response; with its text if its temperature is given."""
        assert slot.score is not None
        versions = slot.versions[slot.response_mask].tolist()
        result = {
            "prompt_index": prompt["prompt_index"],
            "prompt_text": prompt["prompt_text"],
            "reward": slot.score.reward,
            "success": slot.score.success,
            "error": slot.score.error,
            "oldest_version": min(versions, default=None),
            "newest_version": max(versions, default=None),
        }
        if temperature is None:
            return result
        nobody = {"epoch": 0, "group_id": 0, "attempt": 0}  # not in the readable form
        trajectory = slot.trajectory(prompt, **nobody, temperature=temperature)
        readable = self._readable(trajectory, token_texts_too=False)
        return result | {"answer": prompt["answer"], "readable": readable}

    def _readable(self, trajectory: Trajectory, *, token_texts_too: bool) -> dict[str, Any]:
        versions = trajectory.token_versions[trajectory.response_mask].tolist()
        token_ids, mask = trajectory.response_ids.tolist(), trajectory.response_mask
        texts = {"tokens": token_texts(token_ids, self._decode)} if token_texts_too else {}
        edges = np.flatnonzero(np.diff(mask)) + 1
        turns = zip(np.split(trajectory.response_ids, edges), np.split(mask, edges), strict=True)
        parts = [
            {"by": "policy" if own.all() else "environment", "text": self._decode(ids.tolist())}
            for ids, own in turns
        ]
        return {
            "response": self._decode(token_ids),
            **({"turns": parts} if not mask.all() else {}),
            "finish_reason": trajectory.finish_reason,
            "response_tokens": len(versions),
            "versions": [min(versions), max(versions)] if versions else None,
            "reward": trajectory.reward,
            "reward_terms": trajectory.reward_terms,
            "success": trajectory.success,
            "error": trajectory.error,
            **texts,
        }

    def _decode(self, token_ids: list[int]) -> str:
        if token_ids and token_ids[-1] in self._stop_token_ids:
            token_ids = token_ids[:-1]
        try:
            return self._tokenizer.decode(token_ids)
        except (KeyError, TypeError):
            # The output layer is often larger than the vocabulary; the extra ids have no text.
            return "".join(self._decode_one(token_id) for token_id in token_ids)

    def _decode_one(self, token_id: int) -> str:
        try:
            return self._tokenizer.decode([token_id])
        except (KeyError, TypeError):
            return "\N{REPLACEMENT CHARACTER}"
