"""Typed handles of the roles: what the loops may ask, and how long they wait for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grpo_components.cluster.calls import Part
from grpo_components.cluster.role import Role
from grpo_components.exchange.ledger import Ledger, LedgerEntry
from grpo_components.training.step_result import StepResult
from grpo_components.trajectory import GroupSummary

_CHECKPOINT_LANE = "checkpoint"
"""Thread in which a role writes, beside its main one."""
GRACE_S = 30.0
"""Added to a role's own time-out, whose error says more than ours."""


@dataclass(frozen=True)
class Timeouts:
    """Longest waits, in seconds, by the keys of the config's `timeouts`."""

    startup_s: float
    rollout_s: float
    batch_s: float
    train_step_s: float
    weights_s: float
    shutdown_s: float


@dataclass(frozen=True)
class Group:
    """One generated group on its way to the buffer; its tensors stay in the object store."""

    entry: LedgerEntry
    packed: Part
    """Reference of the packed trajectories."""
    packed_summary: Part
    """Reference of the summary."""
    summary: GroupSummary


@dataclass(frozen=True)
class Batch:
    """The whole groups of one training step, in the order of their group ids."""

    packed: Part
    """Reference of the packed trajectories, S = B * G."""
    groups: Sequence[GroupSummary]
    entries: Sequence[LedgerEntry]
    batch_hash: str
    buffered: int
    """Groups left in the buffer."""
    dropped_stale: int
    """Groups found too old while this batch was taken."""
    waited_s: float
    """How long the trainers waited for it."""
    began: float = field(default_factory=time.perf_counter)
    """When the step began to wait, by `time.perf_counter`."""

    @property
    def rewards(self) -> NDArray[np.float64]:
        """[B, G], NaN where a sample failed."""
        return np.array([group.rewards for group in self.groups])

    @property
    def response_lengths(self) -> NDArray[np.int64]:
        """[B, G] tokens of each response, those of the environment included."""
        return np.array([group.response_lengths for group in self.groups])

    @property
    def cut_off(self) -> NDArray[np.bool_]:
        """[B, G] whether a limit on its length ended the response."""
        return np.array([group.finish_reasons for group in self.groups]) == "length"

    @property
    def reference_kl(self) -> NDArray[np.float64] | None:
        """[B, G] estimated KL to the reference, in nats; None without a reference."""
        values = [entry.reference_kl for entry in self.entries]
        return None if any(value is None for value in values) else np.array(values)


class GeneratorHandle:
    """One generator: its weights' version, and the groups and evaluations it samples.

    Args:
        role: the generator.
        ledger: of the run.
        timeout_s: longest wait for a group.
        weights_s: longest wait while it loads weights.
    """

    def __init__(self, role: Role, ledger: Ledger, timeout_s: float, weights_s: float) -> None:
        self.role, self.name = role, role.name
        self.version = 0
        """Policy version of its weights."""
        self.rollouts_since_pull = 0
        self.swapping = ledger.turns.lock()
        """Held while its weights are swapped, or must not be."""
        self._ledger, self._timeout_s, self._weights_s = ledger, timeout_s, weights_s

    @property
    def lost(self) -> bool:
        """Whether it was given up."""
        return self.role.lost

    async def generate_group(self, entry: LedgerEntry, temperature: float) -> Group:
        """Sample and score the responses to one prompt.

        Args:
            entry: the admitted group.
            temperature: of sampling.

        Raises:
            RoleLostError: if the generator was given up.
        """
        identity = (entry.prompt, entry.epoch, entry.group_id, self._ledger.attempt)
        packed, packed_summary, entry.text = self.role.submit(
            "generate_group", *identity, temperature, num_returns=3
        )
        turn = self._ledger.turns.awaited("finish", group=entry.group_id)
        summary = await self.role.result(packed_summary, "generate_group", self._timeout_s, turn)
        await self._ledger.finish_generation(entry.group_id, summary.response_tokens)
        return Group(entry, packed, packed_summary, summary)

    async def load_weights(self, version: int, buckets: Sequence[Any]) -> tuple[int, str] | None:
        """Load one published snapshot between two engine steps.

        Args:
            version: of the weights.
            buckets: references to each trainer rank's part.

        Returns:
            Version and checksum of what was loaded; None if it was restarted meanwhile, and has
            loaded newer weights since.
        """
        loading = self.role.submit("load_weights", version, *buckets, once=True)
        return await self.role.result(loading, "load_weights", self._weights_s)

    async def begin_attempt(self) -> None:
        """Accept weights of an older version than its own."""
        await self.role.call("begin_attempt", timeout_s=self._weights_s)

    async def evaluate(
        self,
        prompts: Sequence[Any],
        temperature: float,
        samples: int,
        *,
        step: int,
        timeout_s: float,
    ) -> list[dict[str, Any]]:
        """Answer held-out prompts; see `Generator.evaluate`."""
        order = self._ledger.turns
        turn = order.awaited("evaluate", role=self.name, step=step)
        results = await self.role.call(
            "evaluate", prompts, temperature, samples, timeout_s=timeout_s, turn=turn
        )
        order.happened("evaluate", role=self.name, step=step)
        return results


class RewardModelHandle:
    """The learned reward.

    Args:
        role: the reward model.
        timeout_s: longest wait for the scores of a group.
    """

    def __init__(self, role: Role, timeout_s: float) -> None:
        self._role, self._timeout_s = role, timeout_s

    async def add_scores(self, group: Group) -> Group:
        """The group with the learned reward added to its rewards."""
        entry = group.entry
        packed, packed_summary, entry.text = self._role.submit(
            "add_scores", group.packed, entry.text, num_returns=3
        )
        summary = await self._role.result(packed_summary, "add_scores", self._timeout_s)
        return Group(entry, packed, packed_summary, summary)


class ReferencesHandle:
    """The frozen references, which share the groups.

    Args:
        roles: all of them.
        timeout_s: longest wait for the logprobs of a group.
    """

    def __init__(self, roles: Sequence[Role], timeout_s: float) -> None:
        self._roles, self._timeout_s = roles, timeout_s

    async def add_logprobs(self, group: Group) -> Group:
        """The group with reference logprobs; `entry.reference_kl` gets their KL."""
        role = self._roles[group.entry.group_id % len(self._roles)]
        packed, kl = role.submit("add_logprobs", group.packed, num_returns=2)
        group.entry.reference_kl = await role.result(kl, "add_logprobs", self._timeout_s)
        return replace(group, packed=packed)


class ReplayBufferHandle:
    """The replay buffer, and the ledger's record of what enters and leaves it.

    Args:
        role: the replay buffer.
        ledger: of the run.
        timeout_s: longest wait for room, or for a batch.
        weights_s: longest wait while it is filled again after a restart.
        wait_for_stale: wait for groups in flight that a step without them would make stale.
    """

    def __init__(
        self,
        role: Role,
        ledger: Ledger,
        timeout_s: float,
        weights_s: float,
        *,
        wait_for_stale: bool,
    ) -> None:
        self.role, self._ledger, self._timeout_s = role, ledger, timeout_s
        self._wait_for_stale = wait_for_stale
        role.recover = partial(self._refill, weights_s)

    async def add(self, group: Group) -> None:
        """Add a group; waits while the buffer is full."""
        group.entry.parts = (group.packed, group.packed_summary)
        await self.role.call("add", *group.entry.parts, timeout_s=self._timeout_s + GRACE_S)
        await self._ledger.enter_buffer(group.entry.group_id)

    async def take(self, num_groups: int) -> Batch:
        """Wait for one batch of whole, fresh groups; stale ones are dropped and issued again.

        Args:
            num_groups: B, groups of a training step.

        Raises:
            TimeoutError: naming who waited for whom.
        """
        began, ledger, dropped = time.perf_counter(), self._ledger, 0
        while True:
            if self._wait_for_stale:
                await ledger.until_none_is_doomed(self._timeout_s)
            packed, summary = self.role.submit(
                "take", *ledger.next_batch(num_groups), num_returns=2
            )
            taken = await self.role.result(summary, "take", self._timeout_s + GRACE_S)
            stale = [group.group_id for group in taken.dropped]
            entries = await ledger.take([group.group_id for group in taken.groups], stale)
            dropped += len(stale)
            if taken.groups:  # a take that only found stale groups has no batch
                waited_s, digest = time.perf_counter() - began, taken.batch_hash
                return Batch(
                    packed, taken.groups, entries, digest, taken.buffered, dropped, waited_s, began
                )

    async def texts(self, entries: Sequence[LedgerEntry]) -> list[dict[str, Any] | None]:
        """Groups as a person would read them; None for one restored from a checkpoint."""
        return [
            entry.text and await self.role.answer(entry.text, "a group's text", 60)
            for entry in entries
        ]

    async def write_state(self, folder: Path, parts: Sequence[Any]) -> str | None:
        """Write buffered groups to a checkpoint, beside other calls.

        Args:
            folder: of the checkpoint's state.
            parts: references of each group and its summary.

        Returns:
            What went wrong; None if nothing did.
        """
        call = {"lane": _CHECKPOINT_LANE, "timeout_s": self._timeout_s}
        return await self.role.call("write_state", str(folder), *parts, **call)

    async def read_state(self, folder: Path) -> None:
        """Fill the buffer with the groups of a checkpoint that the ledger has as buffered.

        Args:
            folder: of the checkpoint's state.
        """
        buffered = self._ledger.in_state("buffered")
        group_ids = [entry.group_id for entry in buffered]
        *parts, _, nothing = self.role.submit(
            "read_state", str(folder), group_ids, num_returns=2 * len(buffered) + 2
        )
        await self.role.result(nothing, "read_state", self._timeout_s)
        for number, entry in enumerate(buffered):
            entry.parts = parts[2 * number : 2 * number + 2]
        await self.role.call("refill", *parts, timeout_s=self._timeout_s)

    async def begin_again(self) -> None:
        """Start anew and empty, for the next attempt."""
        await self.role.begin_again()

    async def _refill(self, timeout_s: float) -> None:
        """Give a restarted buffer the groups that the ledger has as buffered."""
        parts = [part for entry in self._ledger.in_state("buffered") for part in entry.parts]
        await self.role.call("refill", *parts, timeout_s=timeout_s)


class TrainersHandle:
    """All trainer ranks; they get the same calls in the same order.

    Args:
        roles: the ranks.
        ledger: of the run.
        train_step_s: longest wait for a step.
        weights_s: longest wait for exported weights.
    """

    def __init__(
        self, roles: Sequence[Role], ledger: Ledger, train_step_s: float, weights_s: float
    ) -> None:
        self._roles, self._ledger = roles, ledger
        self._train_step_s, self._weights_s = train_step_s, weights_s

    async def train_step(self, batch: Batch, advantages: NDArray[Any]) -> StepResult:
        """Train on one batch, every rank on its part.

        Args:
            batch: B groups of G responses.
            advantages: [B, G].
        """
        steps_done = self._ledger.steps_done
        return (await self._on_all("train_step", batch.packed, advantages.ravel(), steps_done))[0]

    async def gather_weights(self) -> int:
        """Gather the sharded weights; returns their policy version."""
        return (await self._on_all("gather_weights"))[0]

    def export_weights(self, version: int) -> tuple[list[Part], list[Part]]:
        """References to each rank's bucket and manifest; packing overlaps the next step."""
        exports = [
            role.submit("export_weights", version, num_returns=2, lane="export")
            for role in self._roles
        ]
        buckets, manifests = zip(*exports, strict=True)
        return list(buckets), list(manifests)

    async def manifests(self, references: Sequence[Any]) -> list[Any]:
        """What the ranks exported, by the references that `export_weights` returned."""
        exports = zip(self._roles, references, strict=True)
        return [
            await role.answer(part, "export_weights", self._weights_s) for role, part in exports
        ]

    async def hold_state(self, *, in_background: bool) -> None:
        """Keep the state of this moment for `write_state`, as a copy if steps go on meanwhile."""
        await self._on_all("hold_state", in_background)

    async def write_state(self, folder: Path) -> list[str | None]:
        """Write the held state to a checkpoint; per rank what went wrong, None if nothing did."""
        return await self._on_all("write_state", str(folder), lane=_CHECKPOINT_LANE)

    async def load_state(self, checkpoint: Path) -> None:
        """Go on from a checkpoint."""
        await self._on_all("load_state", str(checkpoint))

    async def _on_all(self, method: str, *args: Any, lane: str = "main") -> list[Any]:
        """Call a method of every rank at once: they meet in collectives."""
        limit_s = self._train_step_s
        calls = (role.call(method, *args, timeout_s=limit_s, lane=lane) for role in self._roles)
        return await asyncio.gather(*calls)


class ParameterServerHandle:
    """The parameter server.

    Args:
        role: the server.
        timeout_s: longest wait.
    """

    def __init__(self, role: Role, timeout_s: float) -> None:
        self._role, self._timeout_s = role, timeout_s

    async def push(self, version: int, buckets: Sequence[Any], manifests: Sequence[Any]) -> None:
        """Publish a snapshot; see `VLLMParameterServer.push`."""
        await self._role.call("push", version, buckets, manifests, timeout_s=self._timeout_s)

    async def newest(self) -> tuple[int, list[Any], list[Any]]:
        """Version, buckets and manifests of the newest snapshot."""
        return await self._role.call("newest", timeout_s=self._timeout_s)

    async def acknowledge(self, generator: str, version: int) -> None:
        """Record that a generator has loaded a version."""
        await self._role.call("acknowledge", generator, version, timeout_s=self._timeout_s)

    async def begin_again(self) -> None:
        """Start anew, without any snapshot, for the next attempt."""
        await self._role.begin_again()


@dataclass(frozen=True)
class Roles:
    """The handles of all roles of a run."""

    generators: Sequence[GeneratorHandle]
    buffer: ReplayBufferHandle
    trainers: TrainersHandle
    server: ParameterServerHandle
    references: ReferencesHandle | None
    reward_model: RewardModelHandle | None

    def living_generators(self) -> Iterator[GeneratorHandle]:
        """Those that were not given up."""
        return (generator for generator in self.generators if not generator.lost)
