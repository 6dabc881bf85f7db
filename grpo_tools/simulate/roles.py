"""Stand-ins that only wait as long as a role works: generators, trainers, references."""

from __future__ import annotations

import asyncio
import heapq
import math
import random
from collections import Counter, deque
from typing import Any

from numpy.typing import NDArray

from grpo_components.exchange.weight_probe import LoadedWeights
from grpo_components.exchange.weights import snapshot_checksum
from grpo_components.rollout.sequence_budget import SequenceBudget
from grpo_components.settings import Settings
from grpo_components.training.step_result import StepResult
from grpo_components.trajectory import GroupSummary, PackedTrajectories, pack
from grpo_tools.simulate.fit import Lengths, Times
from grpo_tools.simulate.virtual_time import BusyTime, T, now


class VirtualEngine:
    """Simulates an engine that adds one token to every running sequence per step, as vLLM does.

    A single wait stands for all steps until a sequence begins or ends. A request or new weights
    that arrive meanwhile enter at the end of the present step.
    """

    def __init__(self, times: Times, max_num_seqs: int) -> None:
        self._times, self._max_num_seqs = times, max_num_seqs
        self._swaps = [(0, 0)]
        """(first step, version) of each version of the weights, in order."""
        self._step = self._number = 0
        self._waiting: deque[tuple[int, asyncio.Future[Counter[int]]]] = deque()
        self._loads: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._running: list[tuple[int, int, int, asyncio.Future[Counter[int]]]] = []
        """Heap of running sequences: (step after which it ends, its number, first step, future)."""
        self._arrived = asyncio.Event()
        self.busy = BusyTime()

    def sample(self, tokens: int) -> asyncio.Future[Counter[int]]:
        """Queue a response to sample; the future's result counts its tokens by policy version."""
        return self._queue(self._waiting, tokens)

    def load(self, version: int) -> asyncio.Future[None]:
        """Queue a swap of the weights; the engine makes it before its next step."""
        return self._queue(self._loads, version)

    def _queue(self, queue: deque[tuple[int, asyncio.Future[T]]], given: int) -> asyncio.Future[T]:
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        queue.append((given, future))
        self._arrived.set()
        return future

    async def run(self) -> None:
        """Make engine steps forever, and wait while there is nothing to do."""
        while True:
            if not (self._waiting or self._loads or self._running):
                self._arrived.clear()
                await self._arrived.wait()
            with self.busy.count():
                while self._loads:
                    version, loaded = self._loads.popleft()
                    await asyncio.sleep(self._times.load_s)
                    self._swaps.append((self._step, version))
                    loaded.set_result(None)
                    await asyncio.sleep(0)  # who waits for the weights goes on before the next step
                prompts = self._enter()
                if self._running:
                    await self._make_steps(prompts)

    def _enter(self) -> int:
        """Move waiting sequences to the running ones, up to `max_num_seqs`; return how many."""
        entering = min(len(self._waiting), self._max_num_seqs - len(self._running))
        for _ in range(entering):
            tokens, future = self._waiting.popleft()
            heapq.heappush(
                self._running, (self._step + max(1, tokens), self._number, self._step, future)
            )
            self._number += 1
        return entering

    async def _make_steps(self, prompts: int) -> None:
        """Make steps until a sequence ends, or to the end of a step in which something arrives."""
        sequences, began = len(self._running), now()
        first = self._times.engine_step(sequences, prompts)
        later = self._times.engine_step(sequences)
        steps = self._running[0][0] - self._step
        self._arrived.clear()
        try:
            async with asyncio.timeout(first + (steps - 1) * later):
                await self._arrived.wait()
            passed = now() - began
            whole = 1 + math.ceil(max(0.0, passed - first) / later - 1e-9) if later else steps
            steps = min(steps, whole)
            await asyncio.sleep(max(0.0, first + (steps - 1) * later - passed))
        except TimeoutError:
            pass
        self._step += steps
        while self._running and self._running[0][0] <= self._step:
            _, _, entered, future = heapq.heappop(self._running)
            future.set_result(self._versions(entered))

    def _versions(self, first: int) -> Counter[int]:
        """Count the steps since the step `first`, by the policy version that made them."""
        found, end = Counter[int](), self._step
        for start, version in reversed(self._swaps):
            if start < end:
                found[version] += end - max(start, first)
                end = max(start, first)
            if start <= first:
                break
        return found


_NO_TOKENS: PackedTrajectories = pack([])


class VirtualGenerator:
    """Waits as long as a generator works; a real `SequenceBudget` limits its running responses.

    `versions` gets the token versions of each group: group id -> version -> number of tokens.
    """

    def __init__(
        self, setup: Settings, times: Times, lengths: Lengths, versions: dict[int, Counter[int]]
    ) -> None:
        self.engine = VirtualEngine(times, setup.generator.max_num_seqs)
        self._times, self._lengths, self._versions = times, lengths, versions
        self._group_size = setup.group_size
        self._budget = SequenceBudget(setup.rollouts_in_flight, setup.group_size)
        self._collecting = asyncio.Lock()

    async def reserve(self, patience_s: float) -> int:
        """Wait for room for another group; see `Generator.reserve`."""
        return await self._budget.reserve(patience_s)

    async def generate_group(
        self, prompt: dict[str, Any], epoch: int, group_id: int, attempt: int, temperature: float
    ) -> tuple[PackedTrajectories, GroupSummary, dict[str, Any]]:
        """Wait as long as a group takes; see `Generator.generate_group`."""
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
        return _NO_TOKENS, summary, {}

    async def _collect(self) -> None:
        """Wait as long as half of a group's work outside the engine takes; one group at a time."""
        async with self._collecting:
            await asyncio.sleep(self._times.collect_s * self._group_size / 2)

    async def load_weights(self, version: int, *buckets: Any) -> LoadedWeights:
        """Wait as long as a weight swap takes; see `Generator.load_weights`."""
        await self.engine.load(version)
        return version, snapshot_checksum(() for _ in buckets), None


class VirtualTrainer:
    """Waits as long as one trainer rank works."""

    def __init__(self, setup: Settings, times: Times, seed: int) -> None:
        self._times, self._group_size, self._num_ranks = times, setup.group_size, setup.num_trainers
        self._random = random.Random(f"{seed} trainer")  # the same on all ranks
        self._exporting = asyncio.Lock()
        self.policy_version, self.busy = 0, BusyTime()

    async def train_step(self, batch: Any, lengths: NDArray[Any], step: int) -> StepResult:
        """Wait as long as a step takes on responses of the given lengths, [S] tokens."""
        tokens, groups = int(lengths.sum()), len(lengths) / self._group_size
        scatter = self._random.choice(self._times.train_scatter)
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
        """Wait as long as the gather takes; see `Trainer.gather_weights`."""
        with self.busy.count():
            await asyncio.sleep(self._times.gather_s)
        return self.policy_version

    async def export_weights(self, version: int) -> tuple[Any, tuple[()]]:
        """Wait as long as an export takes, while steps go on; see `Trainer.export_weights`."""
        async with self._exporting:
            await asyncio.sleep(self._times.export_s)
        return None, ()


class VirtualReference:
    """Waits as long as a reference computes groups of mean length, one after another."""

    def __init__(self, setup: Settings, times: Times, lengths: Lengths) -> None:
        self._seconds = times.reference(setup.group_size * lengths.mean)
        self._computing, self.busy = asyncio.Lock(), BusyTime()

    async def add_logprobs(self, group: Any) -> tuple[Any, list[float]]:
        """Wait as long as a group's logprobs take; see `Reference.add_logprobs`."""
        async with self._computing:
            with self.busy.count():
                await asyncio.sleep(self._seconds)
        return group, []


class VirtualRole:
    """Stands in for `cluster.role.Role`: calls the methods of `target` in this process."""

    lost = False

    def __init__(self, name: str, target: Any) -> None:
        self.name, self._target = name, target

    def submit(self, method: str, *args: Any, num_returns: int = 1, lane: str = "main") -> Any:
        """Start a call; return its task, or one task for each of several results; see `Role`."""
        result = asyncio.create_task(self._run(method, args))

        async def item(number: int) -> Any:
            return (await result)[number]

        if num_returns == 1:
            return result
        return [asyncio.create_task(item(number)) for number in range(num_returns)]

    async def _run(self, method: str, args: tuple[Any, ...]) -> Any:
        values = [await arg if isinstance(arg, asyncio.Task) else arg for arg in args]
        result = getattr(self._target, method)(*values)
        return await result if asyncio.iscoroutine(result) else result

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
        sent = self.submit(method, *args, num_returns=num_returns)
        return await sent if num_returns == 1 else (sent, await sent[1])

    call_once = call

    async def answer(self, reference: asyncio.Task[Any], what: str, timeout_s: float) -> Any:
        """Wait for a result; see `Role.answer`."""
        return await reference
