"""Roles of a run that only take their time: generators, trainers and references."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

from numpy.typing import NDArray

from grpo_components.exchange.weight_probe import LoadedWeights
from grpo_components.exchange.weights import snapshot_checksum
from grpo_components.rollout.sequence_budget import SequenceBudget
from grpo_components.training.step_result import StepResult
from grpo_components.trajectory import GroupSummary, PackedTrajectories, pack
from grpo_components.twin.cores import BusyTime, Process
from grpo_components.twin.times import Lengths, Times
from grpo_components.twin.virtual_engine import VirtualEngine

NO_TOKENS: PackedTrajectories = pack([])


class VirtualGenerator:
    """Takes the time of a generator, whose room for responses is the product's own."""

    def __init__(
        self,
        engine: VirtualEngine,
        process: Process,
        times: Times,
        lengths: Lengths,
        *,
        group_size: int,
        rollouts_in_flight: int,
        versions: dict[int, Counter[int]],
    ) -> None:
        self.engine, self._process, self._times, self._lengths = engine, process, times, lengths
        self._group_size, self._versions = group_size, versions
        self._budget = SequenceBudget(rollouts_in_flight, group_size)

    async def reserve(self, patience_s: float) -> int:
        """Wait for room; see `Generator.reserve`."""
        return await self._budget.reserve(patience_s)

    async def generate_group(
        self, prompt: dict[str, Any], epoch: int, group_id: int, attempt: int, temperature: float
    ) -> tuple[PackedTrajectories, GroupSummary, dict[str, Any]]:
        """Take the time of a group; see `Generator.generate_group`."""
        ended = self._budget.begin_group()
        lengths = self._lengths.of_group(group_id, self._group_size)
        collect_s = self._times.collect_s * self._group_size / 2
        await self._process.work(collect_s)
        versions: Counter[int] = Counter()

        async def respond(number: int, tokens: int) -> None:
            versions.update(await self.engine.sample(tokens))
            ended(number)

        await asyncio.gather(*(respond(i, tokens) for i, tokens in enumerate(lengths)))
        await asyncio.sleep(self._times.reward_s)
        await self._process.work(collect_s)
        self._versions[group_id] = versions
        return NO_TOKENS, self._summary(prompt, group_id, lengths, versions), {}

    def _summary(
        self, prompt: dict[str, Any], group_id: int, lengths: list[int], versions: Counter[int]
    ) -> GroupSummary:
        size = self._group_size
        return GroupSummary(
            group_id=group_id,
            prompt_index=prompt["prompt_index"],
            rewards=[0.0] * size,
            successes=[False] * size,
            response_tokens=lengths,
            response_lengths=lengths,
            oldest_version=min(versions),
            newest_version=max(versions),
            finish_reasons=["stop"] * size,
            errors=[],
            reward_terms=[{}] * size,
            turns=[1] * size,
        )

    async def load_weights(self, version: int, *buckets: Any) -> LoadedWeights:
        """Take the time of a weight swap; see `Generator.load_weights`."""
        await asyncio.sleep(self._times.fetch_s)
        await self.engine.load(version)
        return version, snapshot_checksum(() for _ in buckets), None


class VirtualTrainer:
    """Takes the time of one trainer rank."""

    def __init__(
        self, process: Process, times: Times, group_size: int, num_ranks: int, seed: int
    ) -> None:
        self._process, self._times = process, times
        self._group_size, self._num_ranks = group_size, num_ranks
        self._random = random.Random(f"{seed} trainer")
        self.policy_version, self.busy = 0, BusyTime()

    async def train_step(self, batch: Any, lengths: NDArray[Any], step: int) -> StepResult:
        """Take the time of a training step.

        Args:
            batch: not used.
            lengths: [S] tokens of each response, in place of the advantages.
            step: training steps done.
        """
        tokens = int(lengths.sum())
        scatter = self._random.choice(self._times.train_scatter)  # the same on all ranks
        groups = len(lengths) / self._group_size
        seconds = self._times.train(tokens, groups, self._num_ranks) * scatter
        await self._work(seconds)
        self.policy_version += 1
        return StepResult(
            policy_version=self.policy_version,
            token_versions={},
            token_logprobs={},
            trained_tokens=tokens,
            skipped_because="",
            metrics={},
        )

    async def gather_weights(self) -> int:
        """Take the time of the gather; see `Trainer.gather_weights`."""
        await self._work(self._times.gather_s)
        return self.policy_version

    async def export_weights(self, version: int) -> tuple[Any, tuple[()]]:
        """Take the time of the export, beside the next step; see `Trainer.export_weights`."""
        await self._process.work(self._times.export_s)
        return None, ()

    async def _work(self, seconds: float) -> None:
        with self.busy.count():
            await self._process.work(seconds)


class VirtualReference:
    """Takes the time of a reference."""

    def __init__(self, process: Process, times: Times, group_size: int, lengths: Lengths) -> None:
        self._process, self._times = process, times
        self._group_size, self._lengths = group_size, lengths
        self.busy = BusyTime()

    async def add_logprobs(self, group: Any) -> tuple[Any, list[float]]:
        """Take the time of a group's logprobs; see `Reference.add_logprobs`."""
        tokens = self._group_size * (self._lengths.mean + self._times.prompt_tokens)
        with self.busy.count():
            await self._process.work(self._times.reference_s_per_token * tokens)
        return group, [0.0] * self._group_size
