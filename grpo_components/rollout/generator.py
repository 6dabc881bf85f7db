"""The generator: samples groups with vLLM inside torchrl collectors, and scores them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tensordict import NonTensorData, TensorDict, TensorDictBase, lazy_stack
from torchrl.collectors import Collector
from torchrl.envs import EnvBase
from torchrl.envs.utils import step_mdp

from grpo_components.exchange.weights import Manifest, unpack_bucket
from grpo_components.rollout.reward_pool import RewardPool, RewardSpec, Score
from grpo_components.rollout.vllm_engine import BASE_VERSION, VLLMEngine
from grpo_components.trajectory import (
    GroupSummary,
    PackedTrajectories,
    Trajectory,
    pack,
    summarize,
)

Prompt = dict[str, Any]


def sampling_seed(*identity: int) -> int:
    """A seed from what a sample is, (seed, group, sample), not from when or where it is drawn."""
    return int(np.random.SeedSequence(identity).generate_state(1, np.uint64)[0] >> 1)


class EnginePolicy:
    """The policy of a collector: submits every slot's tokens to the shared engine and waits.

    Args:
        engine: shared by all collectors of the process.
        max_response_tokens: longest response.
        temperature: of sampling.
        stop_token_ids: a response ends with the first of these.
    """

    def __init__(
        self,
        engine: VLLMEngine,
        *,
        max_response_tokens: int,
        temperature: float,
        stop_token_ids: Sequence[int],
    ) -> None:
        self._submit = partial(
            engine.submit,
            max_tokens=max_response_tokens,
            temperature=temperature,
            stop_token_ids=stop_token_ids,
        )
        self.seeds: list[int] = []
        """One per slot, for the next rollout."""

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write `response`, `logprobs`, `versions` and `finish_reason` into every slot."""
        slots = tensordict.unbind(0)
        futures = [
            self._submit(slot["tokens"].tolist(), seed=seed)
            for slot, seed in zip(slots, self.seeds, strict=True)
        ]
        for slot, future in zip(slots, futures, strict=True):
            completion = future.result()
            slot.update(
                TensorDict(
                    response=completion.token_ids,
                    logprobs=completion.logprobs,
                    versions=completion.token_versions,
                    finish_reason=NonTensorData(completion.finish_reason),
                )
            )
        return lazy_stack(list(slots), 0)


class GroupCollector(Collector):
    """A torchrl collector whose rollout is one group, run to its end, as unpadded slots.

    Args:
        env: one slot per response.
        policy: see `EnginePolicy`.
    """

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

    # The parent resets the environment and calls the policy once while it is built.
    def _make_carrier(self) -> None:
        self._carrier = TensorDict(batch_size=self.env.batch_size)
        self._carrier_has_no_device = True

    def _maybe_make_final_rollout(self, make_rollout: bool) -> None:
        self._use_buffers = False

    def rollout(self) -> list[SlotRollout]:
        """Reset the environment and step it until every slot is done."""
        tensordict = self.env.reset()
        slots = [SlotRollout(slot["tokens"].numpy()) for slot in tensordict.unbind(0)]
        while not all(slot.done for slot in slots):
            tensordict = self.env.step(self.policy(tensordict))
            for slot, before in zip(slots, tensordict.unbind(0), strict=True):
                if not slot.done:
                    slot.extend(before)
            tensordict = step_mdp(tensordict)
        return slots


class SlotRollout:
    """The turns of one slot, laid end to end.

    Args:
        prompt_ids: [P] tokens.
    """

    def __init__(self, prompt_ids: NDArray[np.int64]) -> None:
        self.prompt_ids = prompt_ids
        self.response_ids = np.empty(0, np.int64)
        self.response_mask = np.empty(0, np.bool_)
        self.logprobs = np.empty(0, np.float32)
        self.versions = np.empty(0, np.int32)
        self.finish_reason = ""
        self.score: Score | None = None
        self.done = False

    def extend(self, turn: Any) -> None:
        """Append one policy turn and what the environment said after it."""
        after = turn["next"]
        response = turn["response"].numpy()
        known = len(self.prompt_ids) + len(self.response_ids) + len(response)
        said = after["tokens"].numpy()[known:]
        self.response_ids = np.concatenate([self.response_ids, response, said])
        self.response_mask = np.concatenate(
            [self.response_mask, np.ones(len(response), bool), np.zeros(len(said), bool)]
        )
        self.logprobs = np.concatenate(
            [self.logprobs, turn["logprobs"].numpy(), np.zeros(len(said), np.float32)]
        )
        self.versions = np.concatenate(
            [self.versions, turn["versions"].numpy(), np.full(len(said), -1, np.int32)]
        )
        self.finish_reason = turn["finish_reason"]
        self.done = bool(after["done"])
        if self.done:
            self.score = after["score"]

    def trajectory(self, prompt: Prompt, *, epoch: int, group_id: int, attempt: int) -> Trajectory:
        """The slot as a record; a sample whose reward failed has finish_reason error."""
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
            finish_reason="error" if self.score.error else self.finish_reason,  # pyright: ignore
            reward=self.score.reward,
            reward_terms=self.score.terms,
            success=self.score.success,
            error=self.score.error,
        )
        trajectory.check()
        return trajectory


class Generator:
    """One engine, its collectors and its reward processes.

    Args:
        model_path: folder of the base model, loaded as version 0.
        device: cpu or cuda.
        dtype: compute dtype, fp32 or bf16.
        build_tokenizer: makes the torchtune tokenizer.
        build_environment: makes an environment from num_slots, decode and score.
        rewards: by the name in the config.
        reward_workers: processes that score.
        reward_timeout_s: deadline of one sample's rewards.
        group_size: responses per prompt.
        rollouts_in_flight: groups generated at once, one collector thread each.
        seed: sampling seeds derive from it.
        max_response_tokens: longest response.
        temperature: of sampling.
        stop_token_ids: a response ends with the first of these.
        max_model_len: longest prompt plus response, in tokens.
        max_num_seqs: requests that one engine step may batch.
        gpu_memory_utilization: share of the GPU's memory for vLLM.
        enforce_eager: no CUDA graphs.
        recompute_kv_after_pull: recompute the KV of running requests under new weights.
    """

    def __init__(
        self,
        *,
        model_path: str,
        device: str,
        dtype: str,
        build_tokenizer: Callable[[], Any],
        build_environment: Callable[..., EnvBase],
        rewards: dict[str, RewardSpec],
        reward_workers: int,
        reward_timeout_s: float,
        group_size: int,
        rollouts_in_flight: int,
        seed: int,
        max_response_tokens: int,
        temperature: float,
        stop_token_ids: Sequence[int],
        max_model_len: int,
        max_num_seqs: int,
        gpu_memory_utilization: float,
        enforce_eager: bool,
        recompute_kv_after_pull: bool,
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
        )
        self._build_environment = build_environment
        self._build_policy = partial(
            EnginePolicy,
            self._engine,
            max_response_tokens=max_response_tokens,
            temperature=temperature,
            stop_token_ids=stop_token_ids,
        )
        self._group_size, self._seed = group_size, seed
        self._threads = ThreadPoolExecutor(rollouts_in_flight, thread_name_prefix="collector")
        self._collectors = threading.local()
        self.version = BASE_VERSION

    async def generate_group(
        self, prompt: Prompt, epoch: int, group_id: int, attempt: int
    ) -> tuple[PackedTrajectories, GroupSummary, dict[str, Any]]:
        """Sample and score `group_size` responses to one prompt.

        Args:
            prompt: a row of the prompt data set.
            epoch: pass over the data set.
            group_id: decides the sampling seeds, with the seed and the sample's number.
            attempt: life of the run.

        Returns:
            The packed group, its summary, and the group as a person would read it.
        """
        prompts = [prompt] * self._group_size
        seeds = [sampling_seed(self._seed, 0, group_id, i) for i in range(self._group_size)]
        slots = await self._collect(prompts, seeds)
        group = [
            slot.trajectory(prompt, epoch=epoch, group_id=group_id, attempt=attempt)
            for slot in slots
        ]
        text = {
            "prompt_index": prompt["prompt_index"],
            "epoch": epoch,
            "prompt": prompt["prompt_text"],
            "answer": prompt["answer"],
            "responses": [self._readable(t) for t in group],
        }
        return pack(group), summarize(group), text

    async def evaluate(self, prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
        """Sample and score one response to each prompt, with seeds that never change.

        Args:
            prompts: rows of the evaluation data set.

        Returns:
            For each prompt: reward, success, oldest and newest version, error.
        """
        chunks = [
            prompts[i : i + self._group_size] for i in range(0, len(prompts), self._group_size)
        ]
        rollouts = await asyncio.gather(
            *(
                self._collect(
                    chunk, [sampling_seed(self._seed, 1, p["prompt_index"]) for p in chunk]
                )
                for chunk in chunks
            )
        )
        results = []
        for slot in (slot for slots in rollouts for slot in slots):
            assert slot.score is not None
            sampled = slot.versions[slot.response_mask]
            results.append(
                {
                    "reward": slot.score.reward,
                    "success": slot.score.success,
                    "error": slot.score.error,
                    "oldest_version": int(sampled.min()),
                    "newest_version": int(sampled.max()),
                }
            )
        return results

    async def load_weights(self, version: int, *buckets: tuple[Manifest, NDArray[np.uint8]]) -> int:
        """Check new weights and swap them in between two engine steps.

        Args:
            version: policy version of the weights.
            buckets: each trainer rank's part.

        Returns:
            The version, as the acknowledgement.

        Raises:
            ValueError: naming the tensor that is damaged, missing, unknown or of another shape;
                the old weights stay in use.
        """
        tensors = {}
        for manifest, bucket in buckets:
            tensors |= await asyncio.to_thread(unpack_bucket, manifest, bucket)
        await asyncio.wrap_future(self._engine.load_weights(version, tensors))
        self.version = version
        return version

    def close(self) -> None:
        """Stop the engine and the reward processes."""
        self._engine.close()
        self._rewards.close()
        self._threads.shutdown(cancel_futures=True)

    async def _collect(self, prompts: Sequence[Prompt], seeds: list[int]) -> list[SlotRollout]:
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, self._collect_in_thread, prompts, seeds
        )

    def _collect_in_thread(self, prompts: Sequence[Prompt], seeds: list[int]) -> list[SlotRollout]:
        # A collector belongs to one thread; its environment has a fixed number of slots.
        by_size: dict[int, tuple[Any, EnginePolicy, GroupCollector]]
        by_size = self._collectors.__dict__.setdefault("by_size", {})
        if len(prompts) not in by_size:
            env = self._build_environment(
                num_slots=len(prompts), decode=self._decode, score=self._rewards.score
            )
            policy = self._build_policy()
            by_size[len(prompts)] = env, policy, GroupCollector(env, policy)
        env, policy, collector = by_size[len(prompts)]
        env.ask(prompts)
        policy.seeds = seeds
        return collector.rollout()

    def _readable(self, trajectory: Trajectory) -> dict[str, Any]:
        versions = trajectory.token_versions[trajectory.response_mask]
        return {
            "response": self._decode(trajectory.response_ids.tolist()),
            "finish_reason": trajectory.finish_reason,
            "response_tokens": len(versions),
            "versions": [int(versions.min()), int(versions.max())],
            "reward": trajectory.reward,
            "reward_terms": trajectory.reward_terms,
            "success": trajectory.success,
            "error": trajectory.error,
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
