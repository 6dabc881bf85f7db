"""The generator: samples groups (responses to one prompt) with one engine, and scores them."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from grpo_components.exchange.weight_deltas import DeltaBucket, RebuiltWeights
from grpo_components.exchange.weight_probe import LoadedWeights, ProbeReading
from grpo_components.exchange.weights import (
    Manifest,
    StateDict,
    snapshot_checksum,
    unpack_buckets,
)
from grpo_components.malloc import give_back_freed, limit_arenas
from grpo_components.rewards.pool import RewardPool
from grpo_components.rollout.engine import open_engine
from grpo_components.rollout.generator_options import EngineOptions, EnvironmentOptions
from grpo_components.rollout.observation_text import encode_text
from grpo_components.rollout.samples import (
    BASE_VERSION,
    Prompt,
    Sample,
    Scored,
    reward_use,
    sampling_seed,
)
from grpo_components.rollout.schedule import Schedule
from grpo_components.rollout.sequence_budget import SequenceBudget
from grpo_components.rollout.turn_rollouts import TurnRollouts
from grpo_components.rollout.weight_receiver import IncomingWeights
from grpo_components.settings import GeneratorSettings
from grpo_components.trajectory import GroupSummary, PackedTrajectories, Trajectory, pack, summarize

_SWITCH_S = 0.0005
"""Seconds that a thread may keep the GIL while another wants it."""
_END_S = 10.0
"""Seconds that the engine may take to notice that a sender of weights has ended."""
_MAX_UTF8_BYTES = 4
"""Maximum bytes of one character, and therefore the maximum tokens that share one."""
_log = logging.getLogger(__name__)


class Generator:
    """Samples and scores groups, with one engine, its environments and its reward processes."""

    def __init__(
        self,
        *,
        build_tokenizer: Callable[[], Any],
        settings: GeneratorSettings,
        engine: EngineOptions,
        environment: EnvironmentOptions,
        open_rewards: Callable[[], RewardPool],
        group_size: int,
        seed: int,
        rollouts_in_flight: int,
        log_token_texts: bool = False,
        open_schedule: Callable[..., Schedule[Any]] | None = None,
        number: int = 0,
        restart_count: int = 0,
    ) -> None:
        # At Python's 5 ms, other threads delay each engine step that waits for the GIL.
        sys.setswitchinterval(_SWITCH_S)
        limit_arenas(2)  # malloc arenas: with one for each of 100 threads, memory grows
        self._rewards = open_rewards()
        self._tokenizer = build_tokenizer()
        self._group_size, self._seed = group_size, seed
        self._stop_token_ids = set(settings.stop_token_ids or ())
        schedule = open_schedule and open_schedule(number=number, restart_count=restart_count)
        self._engine = open_engine(settings, engine, seed=seed, schedule=schedule)
        self._log_token_texts = log_token_texts
        self._budget = SequenceBudget(rollouts_in_flight, group_size)
        self._kind, self._most_at_once = environment.kind, rollouts_in_flight * group_size
        shared = self._engine, self._rewards, settings, environment
        texts = {"decode": self._decode, "encode": partial(encode_text, self._tokenizer)}
        if environment.kind == "agents":
            from grpo_components.rollout.agent_rollouts import AgentRollouts  # a web server

            self._rollouts = AgentRollouts(*shared, engine.model_path, self._tokenizer)
        elif environment.kind == "torchrl":
            from grpo_components.rollout.collector import CollectedRollouts  # torchrl

            self._rollouts = CollectedRollouts(*shared, **texts)
        else:
            self._rollouts = TurnRollouts(*shared, **texts)
        self.version = self._loading = BASE_VERSION
        self._rebuilt, self._rebuilding = RebuiltWeights(), asyncio.Lock()
        self._sleeps = 0
        self._awaited: dict[int, Future[None]] = {}
        """By transfer number: future that is set once the engine waits for the first tensor."""
        self._receiving: Future[Any] | None = None

    async def reserve(self, patience_s: float) -> int:
        """Wait until a group fits; reserve room for all that fit; return how many (0: timeout)."""
        return await self._budget.reserve(patience_s)

    async def generate_group(
        self, prompt: Prompt, epoch: int, group_id: int, attempt: int, temperature: float
    ) -> tuple[PackedTrajectories, GroupSummary, dict[str, Any]]:
        """Sample and score a group; return its packed trajectories, a summary, and the texts."""
        seed, group_size = self._seed, self._group_size
        ended = self._budget.begin_group()
        samples = [
            Sample(
                {**prompt, "seed": sampling_seed(seed, 2, group_id, i)},
                f"group {group_id} sample {i}",
                sampling_seed(seed, 0, group_id, i),
                *(temperature, epoch, group_id, attempt),
                ended=partial(ended, i),
            )
            for i in range(group_size)
        ]
        scored = await self._collect(samples)
        text = {
            "prompt_index": prompt["prompt_index"],
            "epoch": epoch,
            "prompt": prompt["prompt_text"],
            "answer": prompt["answer"],
            "responses": [self._readable(each, self._log_token_texts) for each in scored],
        }
        packed = pack([record for records, *_ in scored for record in records])
        more = {"reward_use": reward_use(scored), "seeds": [sample.seed for sample in samples]}
        return packed, replace(summarize(packed), **more), text

    async def _collect(self, samples: Sequence[Sample]) -> list[Scored]:
        """Sample and score responses, and log those that failed."""
        with self._engine.use.rollout():
            try:
                scored = await self._rollouts.collect(samples)
            finally:
                for sample in samples:
                    sample.ended()
        for sample, (records, *_) in zip(samples, scored, strict=True):
            if records[0].error is not None:
                _log.error("%s failed: %s", sample.name, records[0].error)
            for record in records:
                record.check()
        return scored

    async def evaluate(
        self,
        prompts: Sequence[Prompt],
        temperature: float,
        samples: int = 1,
        logged: Sequence[int] = (),
    ) -> list[dict[str, Any]]:
        """Sample and score responses to each prompt, with the same seeds in every evaluation.

        Returns one result per response, in the order of the prompts. `logged`: positions of the
        prompts whose results include the text.
        """
        seed = self._seed
        # A torchrl environment has one slot per response of a group; others take one response.
        size = self._group_size if self._kind == "torchrl" else 1
        # At most as many responses at once as in training: time limits include waits for shared
        # threads and processes. Single turns are limited only in scoring: the engine may have room.
        room, free = asyncio.Semaphore(self._most_at_once // size), nullcontext()
        running, scoring = (free, room) if self._kind == "single_turn" else (room, free)
        asked = [
            Sample(
                # All samples of a prompt get the same environment seed.
                {**prompt, "seed": sampling_seed(seed, 3, index)},
                # The first sample's name does not depend on `samples`.
                f"evaluation of prompt {index}" + (f" sample {i}" if i else ""),
                sampling_seed(seed, 1, index, i),
                temperature,
                scoring=scoring,
                evaluates=True,
            )
            for prompt in prompts
            for index in (prompt["prompt_index"],)
            for i in range(samples)
        ]

        async def collect(chunk: Sequence[Sample]) -> list[Scored]:
            async with running:
                return await self._collect(chunk)

        chunks = [asked[i : i + size] for i in range(0, len(asked), size)]
        collected = await asyncio.gather(*map(collect, chunks))
        scored = [each for chunk in collected for each in chunk]
        shown = {i * samples + sample for i in logged for sample in range(samples)}
        return [
            self._evaluated(sample.prompt, each, i in shown)
            for i, (sample, each) in enumerate(zip(asked, scored, strict=True))
        ]

    async def sleep(self) -> int:
        """Free the GPU's memory until `load_weights`; return the number of aborted requests."""
        self._sleeps += 1
        return await asyncio.wrap_future(self._engine.sleep())

    async def load_weights(
        self, version: int, *buckets: tuple[Manifest, NDArray[np.uint8]] | DeltaBucket
    ) -> LoadedWeights:
        """Check new model weights and load them between two engine steps; wake the engine."""
        sleeps = self._sleeps
        deltas = [bucket for bucket in buckets if isinstance(bucket, DeltaBucket)]
        if not deltas:
            return await self._load(version, cast(Any, buckets), sleeps)
        async with self._rebuilding:  # the engine reads the rebuilt bytes until it has loaded them
            self._refuse_late(version, sleeps)
            rebuilt = await asyncio.to_thread(self._rebuilt.rebuild, version, deltas)
            loaded = await self._load(version, rebuilt, sleeps)
            self._rebuilt.keep(rebuilt)
            return loaded

    async def _load(
        self, version: int, buckets: Sequence[tuple[Manifest, NDArray[np.uint8]]], sleeps: int
    ) -> LoadedWeights:
        tensors = await asyncio.to_thread(unpack_buckets, buckets)
        probe = await self._swap(version, sleeps, tensors)
        return version, snapshot_checksum(manifest for manifest, _ in buckets), probe

    async def receive_weights(
        self, version: int, number: int, group: dict[str, Any], *manifests: Manifest
    ) -> LoadedWeights:
        """Receive new weights through vLLM's transfer engine, between two engine steps."""
        awaited = self._awaited.setdefault(number, Future())
        self._awaited = {number: awaited}
        try:
            weights = IncomingWeights(manifests, group, awaited)
            probe = await self._swap(version, self._sleeps, weights)
        except (ValueError, RuntimeError) as error:
            if not awaited.done():
                awaited.set_exception(error)
            raise
        return version, snapshot_checksum(manifests), probe

    async def weights_awaited(self, number: int) -> None:
        """Wait until the engine can receive the weight transfer `number`."""
        await asyncio.wrap_future(self._awaited.setdefault(number, Future()))

    async def _swap(
        self, version: int, sleeps: int, weights: StateDict | IncomingWeights
    ) -> ProbeReading | None:
        """Load weights; return test logprobs; ValueError if newer weights or `sleep` came first."""
        # No await between this check and the update of `_loading`: newer weights could arrive.
        self._refuse_late(version, sleeps)
        loading, self._loading = self._engine.load_weights(version, weights), version
        if isinstance(weights, IncomingWeights):
            self._receiving = loading
        probe = await asyncio.wrap_future(loading)
        self.version = version
        await asyncio.to_thread(give_back_freed)
        return probe

    def _refuse_late(self, version: int, sleeps: int) -> None:
        if version < self._loading:
            raise ValueError(f"weights of version {version} came after those of {self._loading}")
        if sleeps != self._sleeps:  # a cancelled attempt began to load: it must not wake the engine
            raise ValueError(f"weights of version {version} came before the engine fell asleep")

    def begin_attempt(self) -> None:
        """Release reservations and accept older weights: the run restarts from a checkpoint."""
        if self._receiving is not None and not wait([self._receiving], _END_S).done:
            raise RuntimeError("the engine still waits for weights of the earlier attempt")
        self._loading = BASE_VERSION
        self._rebuilt.forget()
        self._budget.begin_attempt()

    def time_use(self) -> dict[str, Any]:
        """Return how the engine has spent its time; see `EngineUse.report`."""
        return self._engine.use.report()

    def close(self) -> None:
        """Stop the engine, the reward processes and the environments."""
        self._engine.close()
        self._rewards.close()
        self._rollouts.close()

    def _evaluated(self, prompt: Prompt, scored: Scored, is_shown: bool) -> dict[str, Any]:
        """Return the evaluation result of one response, with its text if `is_shown`."""
        record = scored[0][0]
        versions = record.token_versions[record.response_mask].tolist()
        result = {
            "prompt_index": prompt["prompt_index"],
            "prompt_text": prompt["prompt_text"],
            "reward": record.reward,
            "success": record.success,
            "error": record.error,
            "oldest_version": min(versions, default=None),
            "newest_version": max(versions, default=None),
            "reward_use": reward_use([scored]),
        }
        if not is_shown:
            return result
        return result | {"answer": prompt["answer"], "readable": self._readable(scored, False)}

    def _readable(self, scored: Scored, token_texts_too: bool) -> dict[str, Any]:
        (trajectory, *_), _, text = scored
        versions = trajectory.token_versions[trajectory.response_mask].tolist()
        token_ids, mask = trajectory.response_ids.tolist(), trajectory.response_mask
        texts = {"tokens": token_texts(token_ids, self._decode)} if token_texts_too else {}
        turns = {} if mask.all() else {"turns": self._turns(trajectory)}
        return {
            "response": self._decode(token_ids) if text is None else text,
            **turns,
            "finish_reason": trajectory.finish_reason,
            "response_tokens": len(versions),
            "versions": [min(versions), max(versions)] if versions else None,
            "reward": trajectory.reward,
            "reward_terms": trajectory.reward_terms,
            "success": trajectory.success,
            "error": trajectory.error,
            **({"session": trajectory.session} if trajectory.session else {}),
            **texts,
        }

    def _turns(self, trajectory: Trajectory) -> list[dict[str, str]]:
        """Return the texts of the policy's and the environment's turns, in their order."""
        mask = trajectory.response_mask
        edges = np.flatnonzero(np.diff(mask)) + 1
        turns = zip(np.split(trajectory.response_ids, edges), np.split(mask, edges), strict=True)
        return [
            {"by": "policy" if own.all() else "environment", "text": self._decode(ids.tolist())}
            for ids, own in turns
        ]

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


def token_texts(token_ids: Sequence[int], decode: Callable[[list[int]], str]) -> list[str]:
    """Return the text of each token of a response.

    If several tokens share a character, the last of them gets it. Each token is decoded together
    with its predecessor, because some tokens lose their leading space when decoded alone.
    """
    texts: list[str] = []
    before: list[int] = []
    pending: list[int] = []
    for number, token_id in enumerate(token_ids, start=1):
        pending.append(token_id)
        found = decode(before + pending)[len(decode(before)) :]
        is_torn = found.endswith("\N{REPLACEMENT CHARACTER}")
        if is_torn and len(pending) < _MAX_UTF8_BYTES and number < len(token_ids):
            texts.append("")
            continue
        texts.append(found)
        before, pending = pending, []
    return texts
