"""The generator: samples groups with vLLM inside torchrl collectors, and scores them."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torchrl.envs import EnvBase

from grpo_components.exchange.weights import Manifest, snapshot_checksum, unpack_buckets
from grpo_components.replay.schedule import open_schedule
from grpo_components.rewards.pool import RewardPool, RewardPoolError, RewardSpec
from grpo_components.rollout.collector import (
    EnginePolicy,
    GroupCollector,
    Prompt,
    SlotRollout,
    sampling_seed,
)
from grpo_components.rollout.environment_thread import EnvironmentThread
from grpo_components.rollout.observation_text import encode_text
from grpo_components.rollout.token_texts import token_texts
from grpo_components.rollout.vllm_engine import BASE_VERSION, EngineStoppedError, VLLMEngine
from grpo_components.trajectory import GroupSummary, PackedTrajectories, Trajectory, pack, summarize

_REPLAY_THREADS = 1000
"""A replay's calls may come in another order, and none may keep another from its engine."""
_CLOSING_S = 5.0
"""What environments get to close; one that hangs ends with the process."""
_log = logging.getLogger(__name__)
_SHOWN = 1000
"""Characters of a failure's message that are kept."""


@dataclass(frozen=True)
class _Seat:
    """What one rollout at a time samples a group of one size with."""

    environment: EnvironmentThread
    env: Any
    policy: EnginePolicy
    collector: GroupCollector


class Generator:
    """One engine, its collectors and its reward processes.

    Args:
        model_path: folder of the base model, loaded as version 0.
        device: cpu or cuda.
        dtype: compute dtype, fp32 or bf16.
        build_tokenizer: makes the torchtune tokenizer.
        build_environment: makes an environment from num_slots, decode, encode, score and
            max_response_tokens.
        slots_apart: each response has an environment and a thread of its own, and not its group.
        rewards: by the name in the config.
        reward_workers: processes that score.
        reward_timeout_s: deadline of one sample's rewards.
        environment_timeout_s: deadline of a rollout's calls into its environment together, rewards
            included.
        group_size: responses per prompt.
        rollouts_in_flight: groups generated at once, one collector thread each.
        seed: sampling seeds derive from it.
        max_response_tokens: longest response, what the environment says included.
        stop_token_ids: a response ends with the first of these.
        truncation: what else than the temperature bends the sampled distribution, by vLLM's names;
            the trainer cannot account for it.
        max_model_len: longest prompt plus response, in tokens.
        max_num_seqs: requests that one engine step may batch.
        gpu_memory_utilization: share of the GPU's memory for vLLM.
        enforce_eager: no CUDA graphs.
        recompute_kv_after_pull: recompute the KV of running requests under new weights.
        log_token_texts: a group as a person would read it has the text of each token, too.
        number: which of the generators.
        schedule_folder: gets the engine's schedule; None writes none.
        replayed_folder: has the schedule to keep; None for a new run.
        replay_timeout_s: longest wait for what the schedule to keep has next.
        life: of this process, from 0.
    """

    def __init__(
        self,
        *,
        model_path: str,
        device: str,
        dtype: str,
        build_tokenizer: Callable[[], Any],
        build_environment: Callable[..., EnvBase],
        slots_apart: bool = False,
        rewards: dict[str, RewardSpec],
        reward_workers: int,
        reward_timeout_s: float,
        environment_timeout_s: float,
        group_size: int,
        rollouts_in_flight: int,
        seed: int,
        max_response_tokens: int,
        stop_token_ids: Sequence[int],
        truncation: Mapping[str, float],
        max_model_len: int,
        max_num_seqs: int,
        gpu_memory_utilization: float,
        enforce_eager: bool,
        recompute_kv_after_pull: bool,
        log_token_texts: bool = False,
        number: int = 0,
        schedule_folder: str | None = None,
        replayed_folder: str | None = None,
        replay_timeout_s: float = 0.0,
        life: int = 0,
    ) -> None:
        self._rewards = RewardPool(rewards, num_workers=reward_workers, timeout_s=reward_timeout_s)
        self._tokenizer = build_tokenizer()
        self._stop_token_ids = set(stop_token_ids)
        self._engine = VLLMEngine(
            model_path,
            device=device,
            dtype=dtype,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            gpu_memory_utilization=gpu_memory_utilization,
            enforce_eager=enforce_eager,
            recompute_kv_after_pull=recompute_kv_after_pull,
            seed=seed,
            schedule=open_schedule(
                number, schedule_folder, replayed_folder, replay_timeout_s, life
            ),
        )
        self._build_environment = build_environment
        self._build_policy = partial(
            EnginePolicy,
            self._engine,
            max_response_tokens=max_response_tokens,
            stop_token_ids=stop_token_ids,
            truncation=truncation,
        )
        self._environment_timeout_s = environment_timeout_s
        self._max_response_tokens, self._log_token_texts = max_response_tokens, log_token_texts
        self._group_size, self._seed, self._slots_apart = group_size, seed, slots_apart
        threads = rollouts_in_flight if replayed_folder is None else _REPLAY_THREADS
        threads *= group_size if slots_apart else 1
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="collector")
        self._free_seats: defaultdict[int, deque[_Seat]] = defaultdict(deque)
        """By the number of their slots; as many exist as were ever needed at once."""
        self.version = self._loading = BASE_VERSION

    async def generate_group(
        self, prompt: Prompt, epoch: int, group_id: int, attempt: int, temperature: float
    ) -> tuple[PackedTrajectories, GroupSummary, dict[str, Any]]:
        """Sample and score `group_size` responses to one prompt.

        Args:
            prompt: a row of the prompt data set.
            epoch: pass over the data set.
            group_id: decides the sampling seeds, with the seed and the sample's number.
            attempt: life of the run.
            temperature: of sampling.

        Returns:
            The packed group, its summary, and the group as a person would read it.
        """
        prompts = [
            {**prompt, "seed": sampling_seed(self._seed, 2, group_id, i)}
            for i in range(self._group_size)
        ]
        seeds = [sampling_seed(self._seed, 0, group_id, i) for i in range(self._group_size)]
        names = [f"group {group_id} sample {i}" for i in range(self._group_size)]
        slots = await self._collect(prompts, names, seeds, temperature)
        identity = {"epoch": epoch, "group_id": group_id, "attempt": attempt}
        group = [slot.trajectory(prompt, **identity, temperature=temperature) for slot in slots]
        text = {
            "prompt_index": prompt["prompt_index"],
            "epoch": epoch,
            "prompt": prompt["prompt_text"],
            "answer": prompt["answer"],
            "responses": [self._readable(t) for t in group],
        }
        packed = pack(group)
        return packed, summarize(packed), text

    async def evaluate(
        self, prompts: Sequence[Prompt], temperature: float, samples: int = 1
    ) -> list[dict[str, Any]]:
        """Sample and score responses to each prompt, with seeds that never change.

        Args:
            prompts: rows of the evaluation data set.
            temperature: of sampling; 0 is greedy.
            samples: responses to each prompt.

        Returns:
            For each response, those to one prompt side by side: prompt_index, prompt_text, reward,
            success, oldest and newest version, error.
        """
        # The same world for all samples of a prompt.
        asked = [
            ({**prompt, "seed": sampling_seed(self._seed, 3, prompt["prompt_index"])}, sample)
            for prompt in prompts
            for sample in range(samples)
        ]
        chunks = [asked[i : i + self._group_size] for i in range(0, len(asked), self._group_size)]

        def name(prompt: Prompt, sample: int) -> str:  # the first as in runs with one sample
            which = f" sample {sample}" if sample else ""
            return f"evaluation of prompt {prompt['prompt_index']}{which}"

        rollouts = await asyncio.gather(
            *(
                self._collect(
                    [prompt for prompt, _ in chunk],
                    [name(prompt, i) for prompt, i in chunk],
                    [sampling_seed(self._seed, 1, p["prompt_index"], i) for p, i in chunk],
                    temperature,
                )
                for chunk in chunks
            )
        )
        results = []
        slots = (slot for slots in rollouts for slot in slots)
        for (prompt, _), slot in zip(asked, slots, strict=True):
            assert slot.score is not None
            versions = slot.versions[slot.response_mask].tolist()
            results.append(
                {
                    "prompt_index": prompt["prompt_index"],
                    "prompt_text": prompt["prompt_text"],
                    "reward": slot.score.reward,
                    "success": slot.score.success,
                    "error": slot.score.error,
                    "oldest_version": min(versions, default=None),
                    "newest_version": max(versions, default=None),
                }
            )
        return results

    async def load_weights(
        self, version: int, *buckets: tuple[Manifest, NDArray[np.uint8]]
    ) -> tuple[int, str]:
        """Check new weights and swap them in between two engine steps.

        Args:
            version: policy version of the weights.
            buckets: each trainer rank's part.

        Returns:
            The acknowledgement: the version, and the checksum of all that was checked and loaded.

        Raises:
            ValueError: naming the tensor that is damaged, missing, twice there, unknown or of
                another shape, or a version older than what is loaded; the weights stay as they are.
        """
        tensors = await asyncio.to_thread(unpack_buckets, buckets)
        # Without an await in between: others may have come while this one was checked.
        if version < self._loading:
            raise ValueError(f"weights of version {version} came after those of {self._loading}")
        loading = self._engine.load_weights(version, tensors)
        self._loading = version
        await asyncio.wrap_future(loading)
        self.version = version
        return version, snapshot_checksum(manifest for manifest, _ in buckets)

    def begin_attempt(self) -> None:
        """Accept weights of an older version than these: the run goes back to a checkpoint."""
        self._loading = BASE_VERSION

    def close(self) -> None:
        """Stop the engine, the reward processes, and the environments' own."""
        self._engine.close()
        self._rewards.close()
        self._threads.shutdown(cancel_futures=True)
        seats = [seat for free in self._free_seats.values() for seat in free]
        wait([seat.environment.leave(seat.env.close) for seat in seats], _CLOSING_S)

    async def _collect(
        self, prompts: Sequence[Prompt], names: list[str], seeds: list[int], temperature: float
    ) -> list[SlotRollout]:
        size = 1 if self._slots_apart else len(prompts)
        parts = [slice(start, start + size) for start in range(0, len(prompts), size)]
        run = partial(asyncio.get_running_loop().run_in_executor, self._threads)
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
            if longest > self._max_response_tokens:
                limit = f"generator.max_response_tokens is {self._max_response_tokens}"
                raise ValueError(f"the response got {longest} tokens, and {limit}")
        except (EngineStoppedError, RewardPoolError):
            raise
        except Exception as error:  # a user's environment: its failure is these samples', and told
            # Its state is anyone's guess: the next group gets another.
            seat.environment.leave(seat.env.close)
            _log.warning("an environment failed", exc_info=True)
            problem = f"environment: {type(error).__name__}: {error}"[:_SHOWN]
            return [SlotRollout.failed(np.asarray(p["prompt_ids"]), problem) for p in prompts]
        free.append(seat)
        return slots

    def _seat(self, num_slots: int) -> _Seat:
        environment = EnvironmentThread(self._environment_timeout_s)
        build = partial(
            self._build_environment,
            num_slots=num_slots,
            decode=self._decode,
            encode=partial(encode_text, self._tokenizer),
            score=self._rewards.score,
            max_response_tokens=self._max_response_tokens,
        )
        env = environment.call(build)
        policy = self._build_policy()
        return _Seat(environment, env, policy, GroupCollector(env, policy))

    def _readable(self, trajectory: Trajectory) -> dict[str, Any]:
        versions = trajectory.token_versions[trajectory.response_mask].tolist()
        token_ids, mask = trajectory.response_ids.tolist(), trajectory.response_mask
        texts = {"tokens": token_texts(token_ids, self._decode)} if self._log_token_texts else {}
        edges = np.flatnonzero(np.diff(mask)) + 1
        turns = zip(np.split(trajectory.response_ids, edges), np.split(mask, edges), strict=True)
        said = [
            {"by": "policy" if own.all() else "environment", "text": self._decode(ids.tolist())}
            for ids, own in turns
        ]
        return {
            "response": self._decode(token_ids),
            **({"turns": said} if not mask.all() else {}),
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
            # The output layer is often larger than the vocabulary: such an id has no text.
            return "".join(self._decode_one(token_id) for token_id in token_ids)

    def _decode_one(self, token_id: int) -> str:
        try:
            return self._tokenizer.decode([token_id])
        except (KeyError, TypeError):
            return "\N{REPLACEMENT CHARACTER}"
