"""The replay buffer: holds whole groups, and hands them out oldest weights first, never stale."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torchrl.data import ListStorage
from torchrl.data import ReplayBuffer as TorchRLReplayBuffer
from torchrl.data.replay_buffers import ImmutableDatasetWriter, RandomSampler

from grpo_components.exchange.staleness import StalenessContract
from grpo_components.state_files import read_state, write_state
from grpo_components.trajectory import (
    GroupSummary,
    PackedTrajectories,
    batch_hash,
    concatenate,
    summarize,
)


@dataclass(frozen=True)
class _Item:
    """One buffered group."""

    group: PackedTrajectories
    summary: GroupSummary


class _Slots:
    """Tracks which storage slots are free, and which hold a group that is not consumed yet."""

    def __init__(self, capacity: int) -> None:
        self.free = list(range(capacity - 1, -1, -1))
        self.live: dict[int, _Item] = {}


class _FreeSlotWriter(ImmutableDatasetWriter):
    """Writes groups to free slots; torchrl's own writers overwrite live groups when full."""

    def __init__(self, slots: _Slots) -> None:
        super().__init__()
        self._slots = slots

    def add(self, data: _Item) -> int:
        slot = self._slots.free.pop()
        self._slots.live[slot] = data
        self._storage.set(slot, data)
        return slot


class _OldestVersionSampler(RandomSampler):
    """Consumes the groups with the oldest weights first; ties are broken by group id."""

    def __init__(self, slots: _Slots) -> None:
        super().__init__()
        self._slots = slots

    def sample(self, storage: Any, batch_size: int) -> tuple[torch.Tensor, dict[str, Any]]:
        live = self._slots.live
        order = sorted(
            live, key=lambda s: (live[s].summary.oldest_version, live[s].summary.group_id)
        )
        taken = order[:batch_size]
        self.release(taken)
        return torch.tensor(taken), {}

    def release(self, slots: list[int]) -> None:
        for slot in slots:
            del self._slots.live[slot]
            self._slots.free.append(slot)


@dataclass(frozen=True)
class BatchSummary:
    """What the driver needs to know of a batch without its tokens."""

    groups: list[GroupSummary]
    """The batch's new groups, in the order of group ids."""
    reused: list[GroupSummary]
    """Groups of the batch that earlier steps have trained, too; they follow the new ones."""
    dropped: list[GroupSummary]
    """Groups found stale since the last batch; no batch contained them."""
    buffered: int
    """Number of groups left in the buffer."""
    batch_hash: str
    """Hash of the batch (see `trajectory.batch_hash`); empty if there is no batch."""


class ReplayBuffer:
    """Stores whole groups between generators and trainer, up to a fixed number.

    Producers wait while the buffer is full. The consumer waits while it holds less than a batch. A
    wait that is too long ends with an error that says who waited for whom.
    """

    def __init__(
        self,
        *,
        contract: StalenessContract,
        timeout_s: float,
        stale_tokens: Literal["mask", "drop"] = "drop",
    ) -> None:
        self._make_room(contract.max_living_groups)
        self._contract, self._timeout_s = contract, timeout_s
        self._stale_tokens = stale_tokens
        self._changed = asyncio.Condition()
        self._dropped: list[GroupSummary] = []
        self._kept: dict[int, _Item] = {}
        """Groups that steps have taken and that later ones may train again, by group id."""

    def _make_room(self, capacity: int) -> None:
        self._capacity, self._slots = capacity, _Slots(capacity)
        self._sampler = _OldestVersionSampler(self._slots)
        self._unchecked: dict[int, None] = {}
        """Slots of the groups that came since `_drop_stale` checked all, in this order."""
        self._checked_version: int | None = None
        """Policy version for which it checked them."""
        self._buffer = TorchRLReplayBuffer(
            storage=ListStorage(capacity),
            sampler=self._sampler,
            writer=_FreeSlotWriter(self._slots),
            collate_fn=list,
        )

    async def add(self, group: PackedTrajectories, summary: GroupSummary) -> int:
        """Store one group, waiting while the buffer is full."""
        async with self._changed:
            await self._wait_until(
                lambda: len(self._slots.live) < self._capacity,
                lambda: (
                    f"group {summary.group_id} waited {self._timeout_s:g} s for room in "
                    f"replay_buffer (full with {self._capacity} groups; the trainer takes none)"
                ),
            )
            self._unchecked[self._buffer.add(_Item(group, summary))] = None
            self._changed.notify_all()
            return len(self._slots.live)

    async def take(
        self,
        num_groups: int,
        policy_version: int,
        recorded: tuple[list[int], list[int]] | None = None,
        reuse: tuple[Sequence[int], Sequence[int]] | None = None,
    ) -> tuple[PackedTrajectories, BatchSummary]:
        """Consume one batch of whole groups, waiting until there are enough fresh ones."""
        if recorded is not None:
            return self._batch(*await self._take_as_recorded(*recorded), reuse)

        def enough() -> bool:
            self._drop_stale(policy_version)
            return len(self._slots.live) >= num_groups or bool(self._dropped)

        async with self._changed:
            await self._wait_until(
                enough,
                lambda: (
                    f"the training loop waited {self._timeout_s:g} s for {num_groups} groups "
                    f"in replay_buffer (timeouts.batch_s); it holds {len(self._slots.live)}"
                ),
            )
            dropped, self._dropped = self._dropped, []
            if len(self._slots.live) < num_groups:
                return self._batch([], dropped)
            items: list[_Item] = self._buffer.sample(num_groups)
            items.sort(key=lambda item: item.summary.group_id)
            self._changed.notify_all()
            return self._batch(items, dropped, reuse)

    async def _take_as_recorded(
        self, group_ids: list[int], stale_ids: list[int]
    ) -> tuple[list[_Item], list[GroupSummary]]:
        def missing() -> list[int]:
            here = {item.summary.group_id for item in self._slots.live.values()}
            return [group_id for group_id in group_ids + stale_ids if group_id not in here]

        async with self._changed:
            await self._wait_until(
                lambda: not missing(),
                lambda: (
                    f"replay: the training loop waited {self._timeout_s:g} s for the recorded "
                    f"groups {missing()} in replay_buffer"
                ),
            )
            slots = {item.summary.group_id: slot for slot, item in self._slots.live.items()}
            items = [self._slots.live[slots[group_id]] for group_id in group_ids]
            dropped = [self._slots.live[slots[group_id]].summary for group_id in stale_ids]
            self._sampler.release([slots[group_id] for group_id in group_ids + stale_ids])
            self._changed.notify_all()
            return items, dropped

    def _batch(
        self,
        items: list[_Item],
        dropped: list[GroupSummary],
        reuse: tuple[Sequence[int], Sequence[int]] | None = None,
    ) -> tuple[PackedTrajectories, BatchSummary]:
        again: list[_Item] = []
        if reuse and items:
            again = [self._kept[group_id] for group_id in reuse[0]]
            self._kept = {group_id: self._kept[group_id] for group_id in reuse[1]}
            self._kept |= {item.summary.group_id: item for item in items}
        batch = concatenate(item.group for item in items + again)
        groups, reused = ([item.summary for item in part] for part in (items, again))
        content = batch_hash(batch) if items else ""
        return batch, BatchSummary(groups, reused, dropped, len(self._slots.live), content)

    def keep(self, *parts: Any) -> None:
        """Replace the groups that later steps may train again."""
        items = (_Item(*pair) for pair in zip(parts[::2], parts[1::2], strict=True))
        self._kept = {item.summary.group_id: item for item in items}

    async def refill(self, *parts: Any) -> None:
        """Replace the buffer's groups; the capacity grows if there are more new ones than fit."""
        items = [_Item(*pair) for pair in zip(parts[::2], parts[1::2], strict=True)]
        self._make_room(max(self._capacity, len(items)))
        for item in items:
            self._buffer.add(item)

    def write_state(self, folder: str, batch: PackedTrajectories, *parts: Any) -> str | None:
        """Write groups to a checkpoint; safe while others use the buffer."""
        pairs = zip(parts[::2], parts[1::2], strict=True)
        groups = [{"group": group, "summary": asdict(summary)} for group, summary in pairs]
        try:
            write_state(Path(folder), "buffer", groups)
            write_state(Path(folder), "batch", batch)
        except OSError as error:
            return f"{error}"
        return None

    def read_state(self, folder: str, group_ids: Sequence[int]) -> list[Any]:
        """Load groups from a checkpoint, without adding them to the buffer."""
        saved = {
            # Not the saved summary, which may be of a version with other fields.
            each["summary"]["group_id"]: (each["group"], summarize(each["group"]))
            for each in read_state(Path(folder), "buffer")
        }
        missing = sorted(set(group_ids) - saved.keys())
        assert not missing, f"{folder}: groups {missing} of the ledger are missing"
        return [part for group_id in group_ids for part in saved[group_id]] + [None] * 2

    def _drop_stale(self, policy_version: int) -> None:
        def deciding_version(summary: GroupSummary) -> int:
            masks = self._stale_tokens == "mask"
            return summary.newest_version if masks else summary.oldest_version

        live = self._slots.live
        # Not all of them for each new group: there may be thousands.
        slots = self._unchecked if policy_version == self._checked_version else live
        stale = [
            slot
            for slot in slots
            if not self._contract.may_train(deciding_version(live[slot].summary), policy_version)
        ]
        self._checked_version, self._unchecked = policy_version, {}
        if stale:
            self._dropped += [self._slots.live[slot].summary for slot in stale]
            self._sampler.release(stale)
            self._changed.notify_all()

    async def _wait_until(self, condition: Callable[[], bool], message: Callable[[], str]) -> None:
        # asyncio.wait_for (3.11) would swallow a cancellation that arrives with the result.
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._changed.wait_for(condition)
        except TimeoutError:
            raise TimeoutError(message()) from None
