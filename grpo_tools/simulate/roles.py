"""Roles that only take their time: generator, trainer and reference, and the calls on them."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from grpo_components.exchange.weight_probe import LoadedWeights
from grpo_components.exchange.weights import snapshot_checksum
from grpo_components.rollout.sequence_budget import SequenceBudget
from grpo_components.training.step_result import StepResult
from grpo_components.trajectory import GroupSummary, PackedTrajectories, pack
from grpo_tools.simulate.engine import VirtualEngine
from grpo_tools.simulate.times import Lengths, Times
from grpo_tools.simulate.virtual_time import BusyTime

NO_TOKENS: PackedTrajectories = pack([])
_SIDE_BY_SIDE = ("reserve", "generate_group", "load_weights", "evaluate", "add", "take")
"""Coroutines of the real roles: calls of them run side by side."""


class VirtualGenerator:
    """Takes the time of a generator, whose room for responses is the product's own.

    `versions` gets the token versions of each group: group id -> version -> tokens.
    """

    def __init__(
        self,
        engine: VirtualEngine,
        times: Times,
        lengths: Lengths,
        group_size: int,
        rollouts_in_flight: int,
        versions: dict[int, Counter[int]],
    ) -> None:
        self.engine, self._times, self._lengths = engine, times, lengths
        self._group_size, self._versions = group_size, versions
        self._budget = SequenceBudget(rollouts_in_flight, group_size)
        self._collecting = asyncio.Lock()

    async def reserve(self, patience_s: float) -> int:
        """Wait for room; see `Generator.reserve`."""
        return await self._budget.reserve(patience_s)

    async def generate_group(
        self, prompt: dict[str, Any], epoch: int, group_id: int, attempt: int, temperature: float
    ) -> tuple[PackedTrajectories, GroupSummary, dict[str, Any]]:
        """Take the time of a group; see `Generator.generate_group`."""
        ended, size = self._budget.begin_group(), self._group_size
        lengths = self._lengths.of_group(group_id, size)
        await self._collect()
        versions: Counter[int] = Counter()

        async def respond(number: int, tokens: int) -> None:
            versions.update(await self.engine.sample(tokens))
            ended(number)

        await asyncio.gather(*(respond(i, tokens) for i, tokens in enumerate(lengths)))
        await asyncio.sleep(self._times.reward_s)
        await self._collect()
        self._versions[group_id] = versions
        summary = GroupSummary(
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
        return NO_TOKENS, summary, {}

    async def _collect(self) -> None:
        """Take half of a group's work outside the engine; one interpreter does one at a time."""
        async with self._collecting:
            await asyncio.sleep(self._times.collect_s * self._group_size / 2)

    async def load_weights(self, version: int, *buckets: Any) -> LoadedWeights:
        """Take the time of a weight swap; see `Generator.load_weights`."""
        await self.engine.load(version)
        return version, snapshot_checksum(() for _ in buckets), None


class VirtualTrainer:
    """Takes the time of one trainer rank."""

    def __init__(self, times: Times, group_size: int, num_ranks: int, seed: int) -> None:
        self._times, self._group_size, self._num_ranks = times, group_size, num_ranks
        self._random = random.Random(f"{seed} trainer")
        self.policy_version, self.busy = 0, BusyTime()

    async def train_step(self, batch: Any, lengths: NDArray[Any], step: int) -> StepResult:
        """Take the time of a step on responses of the given lengths, [S] tokens."""
        tokens = int(lengths.sum())
        scatter = self._random.choice(self._times.train_scatter)  # the same on all ranks
        groups = len(lengths) / self._group_size
        with self.busy.count():
            await asyncio.sleep(self._times.train(tokens, groups, self._num_ranks) * scatter)
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
        with self.busy.count():
            await asyncio.sleep(self._times.gather_s)
        return self.policy_version

    async def export_weights(self, version: int) -> tuple[Any, tuple[()]]:
        """Take the time of the export, beside the next step; see `Trainer.export_weights`."""
        await asyncio.sleep(self._times.export_s)
        return None, ()


class VirtualReference:
    """Takes the time of a reference, which computes each group as one of mean lengths."""

    def __init__(self, times: Times, group_size: int, lengths: Lengths) -> None:
        self._seconds = times.reference(group_size * lengths.mean)
        self._group_size, self.busy = group_size, BusyTime()

    async def add_logprobs(self, group: Any) -> tuple[Any, list[float]]:
        """Take the time of a group's logprobs; see `Reference.add_logprobs`."""
        with self.busy.count():
            await asyncio.sleep(self._seconds)
        return group, [0.0] * self._group_size


@dataclass(frozen=True)
class VirtualPart:
    """One part of a call's result."""

    result: asyncio.Task[Any]
    number: int | None
    """Position in the returned tuple; None for a single value."""

    async def value(self) -> Any:
        """Wait for the call, and return this part of its result."""
        result = await self.result
        return result if self.number is None else result[self.number]


class VirtualRole:
    """Calls the methods of a role in this process, with the interface of `cluster.role.Role`."""

    lost = False

    def __init__(self, name: str, target: Any) -> None:
        self.name, self._target = name, target
        self._lanes: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def submit(self, method: str, *args: Any, num_returns: int = 1, lane: str = "main") -> Any:
        """Start a call; see `Role.submit`."""
        task = asyncio.create_task(self._run(method, args, lane))
        if num_returns == 1:
            return VirtualPart(task, None)
        return [VirtualPart(task, number) for number in range(num_returns)]

    async def _run(self, method: str, args: tuple[Any, ...], lane: str) -> Any:
        values = [await arg.value() if isinstance(arg, VirtualPart) else arg for arg in args]
        function = getattr(self._target, method)
        if not asyncio.iscoroutinefunction(function):
            return function(*values)
        if method in _SIDE_BY_SIDE:
            return await function(*values)
        async with self._lanes[lane]:
            return await function(*values)

    async def call(
        self,
        method: str,
        *args: Any,
        timeout_s: float,
        num_returns: int = 1,
        lane: str = "main",
        turn: Any = None,
    ) -> Any:
        """Call a method and wait for its result; see `Role.call`."""
        sent = self.submit(method, *args, num_returns=num_returns, lane=lane)
        if num_returns == 1:
            return await self.answer(sent, method, timeout_s)
        return sent, await self.answer(sent[1], method, timeout_s)

    async def call_once(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Call a method and wait for its result; see `Role.call_once`."""
        return await self.call(method, *args, timeout_s=timeout_s)

    async def answer(self, reference: VirtualPart, what: str, timeout_s: float) -> Any:
        """Wait for a result; see `Role.answer`."""
        return await reference.value()
