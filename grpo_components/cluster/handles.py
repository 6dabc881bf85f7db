"""Typed handles for the driver's calls to roles (processes), with a time limit for each call."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from grpo_components.cluster.batch import Batch
from grpo_components.cluster.role import Role
from grpo_components.cluster.weight_transfer import GRACE_S, WeightTransfer
from grpo_components.errors import RoleFailedError, RoleLostError
from grpo_components.exchange.ledger import Ledger, LedgerEntry
from grpo_components.exchange.weight_deltas import NO_BASE
from grpo_components.exchange.weight_probe import LoadedWeights
from grpo_components.settings import Timeouts
from grpo_components.training.step_result import StepResult
from grpo_components.trajectory import GroupSummary

MAX_DELTAS = 64
"""Maximum number of deltas (pushes of only the changed bytes) after a push of all bytes. A new
generator must load that push and all its deltas."""
CHECKPOINT_LANE = "checkpoint"
"""Name of the thread in which a role writes checkpoints while its main thread works."""


class GeneratorHandle:
    """Calls one generator, which samples groups, answers held-out prompts and loads weights.

    With `counts_successes`, the ledger records each group's successes, for a curriculum.
    """

    def __init__(
        self, role: Role, ledger: Ledger, timeouts: Timeouts, counts_successes: bool = False
    ) -> None:
        self.role, self.name = role, role.name
        self.version = 0
        """Policy version of the generator's weights; -1 if it has none, or has weights from
        before the last `WeightSync.restore`."""
        self.held_version = -1
        """Version that the generator loaded last, and to which it can apply deltas; -1 if it loaded
        none since it started or since the last `WeightSync.restore`."""
        self.load_s = 0.0
        """Seconds that the last load of weights took; 0 if the generator has slept since."""
        self.rollouts_since_pull = 0
        self.swapping = nullcontext() if ledger.events.recording else asyncio.Lock()
        """Lock held while the generator loads weights, or while its weights must not change. A
        replay of a recorded run has no lock: it repeats the recorded order."""
        self.loads: list[asyncio.Event] = []
        """One event per pull in progress (several only in a replay), set when the pull ends. A
        restart of the generator begins a new list."""
        self.reward_use: Counter[str] = Counter()
        """What the rewards used since the last training step, such as a judge's tokens and cost."""
        self._ledger, self._timeouts = ledger, timeouts
        self._counts_successes = counts_successes
        self._reserved = 0
        """Number of further groups for which the generator has reserved room."""

    @property
    def lost(self) -> bool:
        """Whether the generator failed for good, so that the run continues without it."""
        return self.role.lost

    async def has_room(self) -> bool:
        """Wait until the generator has room for another group; return False if it is lost."""
        # Longer than the time-outs of a group, whose errors are clearer.
        limit_s = self._timeouts.weights_s + self._timeouts.rollout_s + GRACE_S
        while not (self._reserved or self._ledger.events.recording):  # a replay repeats the order
            pinned = self._ledger.weights_pinned
            try:
                self._reserved = await self.role.call(
                    "reserve", limit_s, timeout_s=limit_s + GRACE_S
                )
            except RoleLostError:
                return False
            if not (self._reserved or pinned or self._ledger.weights_pinned):
                raise TimeoutError(
                    f"the next group waited for responses that {self.name} still samples or "
                    f"scores; gave up after {limit_s:g} s"
                )
        self._reserved = max(0, self._reserved - 1)
        return True

    async def generate_group(self, entry: LedgerEntry, temperature: float) -> GroupSummary:
        """Sample and score the responses to a prompt; store references to them in `entry`.

        Raises `RoleLostError` if the generator is lost.
        """
        identity = (entry.prompt, entry.epoch, entry.group_id, self._ledger.attempt)
        turn = self._turn("finish", group=entry.group_id)
        call = {"num_returns": 3, "timeout_s": self._timeouts.rollout_s, "turn": turn}
        made = await self.role.call("generate_group", *identity, temperature, **call)
        (*entry.parts, entry.text), summary = made
        self.reward_use.update(summary.reward_use)  # pyright: ignore -- counts are numbers
        scored = summary.scored_successes if self._counts_successes else None
        await self._ledger.finish_generation(entry.group_id, summary.response_tokens, scored)
        return summary

    def _turn(self, event: str, **identity: Any) -> Callable[[], Any] | None:
        """In a replay of a recorded run, return a function that waits for an event; else None."""
        recording = self._ledger.events.recording
        return partial(recording.wait_turn, event, identity) if recording else None

    async def load_weights(self, version: int, buckets: Sequence[Any]) -> LoadedWeights | None:
        """Load one published snapshot of weights between two engine steps.

        Returns None if the generator was restarted meanwhile: a restart loads the newest weights.
        """
        limit_s = self._timeouts.weights_s
        return await self.role.call_once("load_weights", version, *buckets, timeout_s=limit_s)

    async def sleep(self) -> int:
        """Let the generator free its GPU's memory; only the next load of weights wakes it.

        Returns the number of responses that it aborted.
        """
        aborted = await self.role.call("sleep", timeout_s=self._timeouts.weights_s)
        self.version, self.load_s = -1, 0.0
        return aborted

    async def begin_attempt(self) -> None:
        """Prepare to go on from a checkpoint: cancel reservations, accept its older weights."""
        self._reserved = 0
        await self.role.call("begin_attempt", timeout_s=self._timeouts.weights_s)

    async def evaluate(
        self,
        prompts: Sequence[Any],
        temperature: float,
        samples: int,
        logged: Sequence[int] = (),
        *,
        step: int,
        timeout_s: float,
    ) -> list[dict[str, Any]]:
        """Sample and score responses to held-out prompts; see `Generator.evaluate`."""
        turn = self._turn("evaluate", role=self.name, step=step)
        results = await self.role.call(
            "evaluate", prompts, temperature, samples, logged, timeout_s=timeout_s, turn=turn
        )
        self._ledger.events.record("evaluate", role=self.name, step=step)
        for result in results:
            self.reward_use.update(result.get("reward_use", {}))
        return results


@contextlib.contextmanager
def _lost_with_its_node() -> Iterator[None]:
    """Context manager: raise `RoleLostError` if a group was lost with its generator's node."""
    try:
        yield
    except RoleFailedError as failure:
        if failure.kind == "lost":
            raise RoleLostError(failure.role, failure.what) from failure
        raise


class RewardModelHandle:
    """Calls the reward model, which gives each response a learned reward."""

    def __init__(self, role: Role, timeouts: Timeouts) -> None:
        self._role, self._timeouts = role, timeouts

    async def add_scores(self, entry: LedgerEntry) -> GroupSummary:
        """Add the learned reward to a group's rewards; return the group's new summary."""
        call = {"num_returns": 3, "timeout_s": self._timeouts.rollout_s}
        with _lost_with_its_node():
            made = await self._role.call("add_scores", entry.parts[0], entry.text, **call)
        (*entry.parts, entry.text), summary = made
        return summary


class ReferencesHandle:
    """Calls the copies of a frozen model, the reference or the teacher; each group goes to one."""

    def __init__(self, roles: Sequence[Role], timeouts: Timeouts, *, keep_kl: bool = True) -> None:
        self._roles, self._timeouts, self._keep_kl = roles, timeouts, keep_kl

    async def add_logprobs(self, entry: LedgerEntry) -> None:
        """Add to a group its tokens' logprobs, which one copy of the model computes."""
        role, (group, summary) = self._roles[entry.group_id % len(self._roles)], entry.parts
        call = {"num_returns": 2, "timeout_s": self._timeouts.rollout_s}
        with _lost_with_its_node():
            (packed, _), divergences = await role.call("add_logprobs", group, **call)
        if self._keep_kl:
            entry.reference_kl = divergences
        entry.parts = packed, summary


class ReplayBufferHandle:
    """Calls the replay buffer, and records in the ledger which groups enter and leave it."""

    def __init__(
        self, role: Role, ledger: Ledger, timeouts: Timeouts, *, wait_for_stale: bool
    ) -> None:
        self.role, self._ledger, self._timeouts = role, ledger, timeouts
        self._wait_for_stale = wait_for_stale

    async def add(self, entry: LedgerEntry) -> None:
        """Add a group; wait while the buffer is full."""
        added, limit_s = None, self._timeouts.batch_s + GRACE_S
        # None: the buffer was restarted. A step may have taken the group before this call's answer.
        while added is None and entry in self._ledger.in_state("in_flight"):
            with _lost_with_its_node():
                added = await self.role.call_once("add", *entry.parts, timeout_s=limit_s)
        await self._ledger.enter_buffer(entry.group_id)

    async def take(self, num_groups: int) -> Batch:
        """Wait for a batch of whole, fresh groups; drop stale groups and reissue their prompts."""
        began, ledger, dropped = time.perf_counter(), self._ledger, 0
        while True:
            if self._wait_for_stale:
                await ledger.until_none_is_doomed(num_groups, self._timeouts.batch_s)
            asked = ledger.next_batch(num_groups)
            limits = {"num_returns": 2, "timeout_s": self._timeouts.batch_s + GRACE_S}
            (packed, _), taken = await self.role.call("take", *asked, **limits)
            stale, new = [group.group_id for group in taken.dropped], taken.groups
            entries = await ledger.take([group.group_id for group in new], stale, new)
            dropped += len(stale)
            if new:  # empty if all groups found are stale
                waited_s, groups = time.perf_counter() - began, [*new, *taken.reused]
                measured = (taken.batch_hash, taken.buffered, dropped, waited_s, began)
                return Batch(packed, groups, entries, *measured, reused=len(taken.reused))

    async def texts(self, entries: Sequence[LedgerEntry]) -> list[dict[str, Any] | None]:
        """Return the text of each group for the rollout log; None for a group without text.

        A group restored from a checkpoint has none, and a node that dies takes its texts with it.
        The batch itself still has these groups.
        """
        return [entry.text and await self._text(entry.text) for entry in entries]

    async def _text(self, text: Any) -> dict[str, Any] | None:
        try:
            return await self.role.answer(text, "a group's text", 60)
        except RoleFailedError as failure:
            if failure.kind != "lost":
                raise
            return None

    async def write_state(self, folder: Path, parts: Sequence[Any]) -> str | None:
        """Write batch and groups to a checkpoint, beside other calls; return an error or None."""
        call = {"lane": CHECKPOINT_LANE, "timeout_s": self._timeouts.batch_s}
        return await self.role.call("write_state", str(folder), *parts, **call)

    async def read_state(self, folder: Path) -> None:
        """Load the groups of a checkpoint, and put those not yet trained into the buffer."""
        stored = self._ledger.stored()
        group_ids = [entry.group_id for entry in stored]
        call = {"num_returns": 2 * len(stored) + 2, "timeout_s": self._timeouts.batch_s}
        parts, _ = await self.role.call("read_state", str(folder), group_ids, **call)
        for number, entry in enumerate(stored):
            entry.parts = parts[2 * number : 2 * number + 2]
        await self.refill(self._timeouts.batch_s)

    async def begin_again(self) -> None:
        """Restart the buffer, empty, before the run goes on from a checkpoint."""
        await self.role.begin_again()

    async def refill(self, timeout_s: float | None = None) -> None:
        """Fill a restarted buffer with the groups that the ledger lists as buffered."""
        buffered = self._ledger.in_state("buffered")
        parts = [part for entry in buffered for part in entry.parts]
        await self.role.call("refill", *parts, timeout_s=timeout_s or self._timeouts.weights_s)


class TrainersHandle:
    """Calls all trainer ranks; each rank gets the same calls in the same order.

    `turn` returns a context manager that keeps generators off the GPUs while the ranks train or
    load a checkpoint. It yields metrics of the wait for the GPUs: see `Colocation.trainers_turn`.
    """

    def __init__(
        self,
        roles: Sequence[Role],
        ledger: Ledger,
        timeouts: Timeouts,
        turn: Callable[[], AbstractAsyncContextManager[dict[str, float]]] | None = None,
    ) -> None:
        self._roles, self._ledger, self._timeouts = roles, ledger, timeouts
        self._turn = turn or partial(nullcontext, {})

    async def train_step(self, batch: Batch, advantages: NDArray[Any]) -> StepResult:
        """Train on one batch with [B, G] advantages; every rank takes its share."""
        call = "train_step", batch.packed, advantages.ravel(), self._ledger.steps_done
        async with self._turn() as waits:
            result = (await self._on_all(*call))[0]
        for name, seconds in waits.items():
            result.metrics[name] = seconds
        return result

    async def gather_weights(self) -> int:
        """Gather the sharded weights and return their policy version."""
        return (await self._on_all("gather_weights"))[0]

    def export_weights(self, version: int, base: int | None = None) -> tuple[list[Any], list[Any]]:
        """Start to pack the gathered weights; return references to each rank's bytes and manifest.

        `base`: version since which changes are packed (`NO_BASE`: all bytes); None if deltas are
        off. The next training step may run meanwhile.
        """
        args = (version,) if base is None else (version, base)
        exports = [
            role.submit("export_weights", *args, num_returns=2, lane="export")
            for role in self._roles
        ]
        buckets, manifests = zip(*exports, strict=True)
        return list(buckets), list(manifests)

    async def manifests(self, references: Sequence[Any]) -> list[Any]:
        """Wait for the ranks' manifests, which describe the packed tensors, and return them."""
        limit_s = self._timeouts.weights_s
        exports = zip(self._roles, references, strict=True)
        return [await role.answer(part, "export_weights", limit_s) for role, part in exports]

    async def hold_state(self, *, in_background: bool) -> None:
        """Keep the present state for `write_state`, as a copy if the write is in the background."""
        await self._on_all("hold_state", in_background)

    async def write_state(self, folder: Path) -> list[str | None]:
        """Write the held state to a checkpoint; return for each rank why it failed, or None."""
        return await self._on_all("write_state", str(folder), lane=CHECKPOINT_LANE)

    async def load_state(self, checkpoint: Path) -> None:
        """Load the state of a checkpoint on every rank."""
        async with self._turn():
            await self._on_all("load_state", str(checkpoint))

    async def _on_all(self, method: str, *args: Any, lane: str = "main") -> list[Any]:
        """Call a method of all ranks at the same time: they wait for each other in collectives."""
        limit_s = self._timeouts.train_step_s
        calls = (role.call(method, *args, timeout_s=limit_s, lane=lane) for role in self._roles)
        return await asyncio.gather(*calls)


@dataclass
class Push:
    """One push of weights to the parameter server: Ray references to the bytes, and the size."""

    version: int
    buckets: list[Any]
    manifests: list[Any]
    whole: bool
    nbytes: int | None
    """Bytes that all ranks push together; None until they are known."""


class ParameterServerHandle:
    """Publishes the trainers' weights in the parameter server: all bytes, or only a delta.

    After a whole push, up to `MAX_DELTAS` pushes are deltas, as long as these are together smaller
    than the whole push. The choice depends on the weights alone, so a replay makes the same choice.
    """

    def __init__(
        self, role: Role, trainers: TrainersHandle, timeouts: Timeouts, *, deltas: bool = False
    ) -> None:
        self.role, self._trainers, self._limit_s = role, trainers, timeouts.weights_s
        self._deltas = deltas
        self._pushes: list[Push] = []
        """The last push of all bytes, and all deltas since; emptied before the run goes on from a
        checkpoint."""
        self.nbytes = 0
        """Bytes of the last push that is packed; 0 before the first."""

    async def begin(self) -> Push:
        """Begin a push: gather the trainers' weights, and start to pack them.

        Waits first until the last push is packed, if its size is still unknown.
        """
        last = self._pushes[-1] if self._pushes else None
        if last is not None and last.nbytes is None:  # its size decides on the next push
            manifests = await self._trainers.manifests(last.manifests)
            last.nbytes = sum(entry.pushed_nbytes for manifest in manifests for entry in manifest)
            self.nbytes = last.nbytes
        version, base = await self._trainers.gather_weights(), self._base()
        exported = self._trainers.export_weights(version, base)
        # Without deltas, all pushes have the same size.
        nbytes = None if self._deltas or last is None else last.nbytes
        return Push(version, *exported, base in (None, NO_BASE), nbytes)

    async def push(self, push: Push) -> None:
        """Send a push to the parameter server, even if the trainers still pack its bytes."""
        await self._send(push)
        self._pushes = [push] if push.whole else [*self._pushes, push]

    async def push_again(self) -> None:
        """Send the last whole push and all deltas since to a restarted server."""
        for push in self._pushes:
            await self._send(push)

    async def _send(self, push: Push) -> None:
        pushed = push.version, push.buckets, push.manifests, push.whole
        await self.role.call("push", *pushed, timeout_s=self._limit_s)

    def _base(self) -> int | None:
        """Return the version since which to push changes; `NO_BASE`: all; None: deltas are off."""
        if not self._deltas:
            return None
        if not self._pushes:
            return NO_BASE
        whole, *deltas = (push.nbytes or 0 for push in self._pushes)
        like_the_last = sum(deltas) + deltas[-1] if deltas else 0
        if like_the_last > whole or len(deltas) >= MAX_DELTAS:
            return NO_BASE
        return self._pushes[-1].version

    async def newest(self, held: int = -1) -> tuple[int, list[Any], list[Any]]:
        """Return the newest snapshot of the weights; see `VLLMParameterServer.newest`."""
        return await self.role.call("newest", held, timeout_s=self._limit_s)

    async def begin_again(self) -> None:
        """Restart the server, without a snapshot, before the run goes on from a checkpoint."""
        self._pushes = []
        await self.role.begin_again()


@dataclass(frozen=True)
class Roles:
    """The handles of all roles of a run; a field is None if the run does not use that role."""

    generators: Sequence[GeneratorHandle]
    buffer: ReplayBufferHandle
    trainers: TrainersHandle
    server: ParameterServerHandle
    references: ReferencesHandle | None
    reward_model: RewardModelHandle | None
    teachers: ReferencesHandle | None = None
    transfer: WeightTransfer | None = None
    """Sends weights to the generators; None: each fetches them from the object store."""

    def living_generators(self) -> Iterator[GeneratorHandle]:
        """Return the generators that are not lost."""
        return (generator for generator in self.generators if not generator.lost)
