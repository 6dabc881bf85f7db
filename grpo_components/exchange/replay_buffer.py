"""The replay buffer: stores whole groups, and hands out the oldest first, but never stale ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torchrl.data import ListStorage
from torchrl.data import ReplayBuffer as TorchRLReplayBuffer
from torchrl.data.replay_buffers import RandomSampler

from grpo_components.exchange.staleness import StalenessContract
from grpo_components.state_files import read_state, write_state
from grpo_components.trajectory import (
    GroupSummary,
    PackedTrajectories,
    batch_hash,
    concatenate,
    summarize,
)

_Pair = tuple[PackedTrajectories, GroupSummary]
"""One buffered group, and its summary."""


class _OldestVersionSampler(RandomSampler):
    """Picks groups by the policy version of their oldest token, oldest first; then by group id."""

    def sample(self, storage: Any, batch_size: int) -> tuple[torch.Tensor, dict[str, Any]]:
        summaries = [summary for _, summary in storage[: len(storage)]]
        order = sorted(
            range(len(summaries)),
            key=lambda i: (summaries[i].oldest_version, summaries[i].group_id),
        )
        return torch.tensor(order[:batch_size]), {}


@dataclass(frozen=True)
class BatchSummary:
    """Summary of a batch for the driver, without tokens."""

    groups: list[GroupSummary]
    """The batch's new groups, in the order of group ids."""
    reused: list[GroupSummary]
    """Groups of the batch that an earlier step has trained already; they follow the new ones."""
    dropped: list[GroupSummary]
    """Groups dropped as stale since the last batch; no batch contained them."""
    buffered: int
    """Number of groups left in the buffer."""
    batch_hash: str
    """Hash of the batch (see `trajectory.batch_hash`); empty if there is no batch."""


class ReplayBuffer:
    """Stores whole groups between generators and trainer, up to a fixed number.

    Producers wait while the buffer is full. The consumer waits while the buffer holds less
    than a batch. A wait that is too long ends with an error that says who waited for whom.
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

    def _make_room(self, capacity: int) -> None:
        self._capacity = capacity
        self._checked: tuple[int | None, int] = None, 0
        """(policy version, n): the buffer's first n groups are fresh enough for this version."""
        self._buffer = TorchRLReplayBuffer(
            storage=ListStorage(capacity), sampler=_OldestVersionSampler(), collate_fn=list
        )

    async def add(self, group: PackedTrajectories, summary: GroupSummary) -> int:
        """Store one group once there is room; return the new size."""
        async with self._changed:
            await self._wait_until(
                lambda: len(self._buffer) < self._capacity,
                lambda: (
                    f"group {summary.group_id} waited {self._timeout_s:g} s for room in "
                    f"replay_buffer (full with {self._capacity} groups; the trainer takes none)"
                ),
            )
            self._buffer.add((group, summary))
            self._changed.notify_all()
            return len(self._buffer)

    async def take(
        self,
        num_groups: int,
        policy_version: int,
        recorded: tuple[list[int], list[int]] | None = None,
        *again: Any,
    ) -> tuple[PackedTrajectories, BatchSummary]:
        """Wait for a batch and return it.

        If stale groups were dropped and too few are left, the batch is empty. `recorded`: ids of
        the groups to train and to drop, in a replay. `again`: the groups that the step trains
        again, each followed by its summary.
        """
        if recorded is not None:
            return self._batch(*await self._take_as_recorded(*recorded), again)

        def enough() -> bool:
            self._drop_stale(policy_version)
            return len(self._buffer) >= num_groups or bool(self._dropped)

        async with self._changed:
            await self._wait_until(
                enough,
                lambda: (
                    f"the training loop waited {self._timeout_s:g} s for {num_groups} groups "
                    f"in replay_buffer (timeouts.batch_s); it holds {len(self._buffer)}"
                ),
            )
            dropped, self._dropped = self._dropped, []
            if len(self._buffer) < num_groups:
                return self._batch([], dropped)
            return self._batch(self._remove(self._buffer.sample(num_groups)), dropped, again)

    async def _take_as_recorded(
        self, group_ids: list[int], stale_ids: list[int]
    ) -> tuple[list[_Pair], list[GroupSummary]]:
        def missing() -> list[int]:
            groups = _by_id(self._buffer[:])
            return [group_id for group_id in group_ids + stale_ids if group_id not in groups]

        async with self._changed:
            await self._wait_until(
                lambda: not missing(),
                lambda: (
                    f"replay: the training loop waited {self._timeout_s:g} s for the recorded "
                    f"groups {missing()} in replay_buffer"
                ),
            )
            groups = _by_id(self._buffer[:])
            pairs, stale = ([groups[each] for each in ids] for ids in (group_ids, stale_ids))
            self._remove(pairs + stale)
            return pairs, [summary for _, summary in stale]

    def _remove(self, pairs: list[_Pair]) -> list[_Pair]:
        """Take groups out of the buffer; return them sorted by group id."""
        taken = _by_id(pairs)
        rest = [pair for pair in self._buffer[:] if pair[1].group_id not in taken]
        self._buffer.empty()
        if rest:
            self._buffer.extend(rest)
        self._checked = self._checked[0], len(rest)
        self._changed.notify_all()
        return [taken[group_id] for group_id in sorted(taken)]

    def _batch(
        self, pairs: list[_Pair], dropped: list[GroupSummary], again: Sequence[Any] = ()
    ) -> tuple[PackedTrajectories, BatchSummary]:
        reused = _pairs(again) if pairs else []
        batch = concatenate(group for group, _ in pairs + reused)
        groups, old = ([summary for _, summary in part] for part in (pairs, reused))
        content = batch_hash(batch) if pairs else ""
        return batch, BatchSummary(groups, old, dropped, len(self._buffer), content)

    async def refill(self, *parts: Any) -> None:
        """Replace all groups, as for a resume, by `parts` (group, summary, ...); grow if needed."""
        pairs = _pairs(parts)
        self._make_room(max(self._capacity, len(pairs)))
        for pair in pairs:
            self._buffer.add(pair)

    def write_state(self, folder: str, batch: PackedTrajectories, *parts: Any) -> str | None:
        """Write batch and groups to a checkpoint while other calls run; return an error or None."""
        groups = [{"group": group, "summary": asdict(summary)} for group, summary in _pairs(parts)]
        try:
            write_state(Path(folder), "buffer", groups)
            write_state(Path(folder), "batch", batch)
        except OSError as error:
            return f"{error}"
        return None

    def read_state(self, folder: str, group_ids: Sequence[int]) -> list[Any]:
        """Read groups of a checkpoint; return [group, summary, ...], followed by None twice."""
        saved = {
            # Not the saved summary, which may be of a version with other fields.
            each["summary"]["group_id"]: (each["group"], summarize(each["group"]))
            for each in read_state(Path(folder), "buffer")
        }
        missing = sorted(set(group_ids) - saved.keys())
        assert not missing, f"{folder}: groups {missing} of the ledger are missing"
        # At least two results, even for no groups: `Role.call` waits for the second.
        return [part for group_id in group_ids for part in saved[group_id]] + [None] * 2

    def _drop_stale(self, policy_version: int) -> None:
        masks = self._stale_tokens == "mask"
        version, known = self._checked
        # Checks only groups that are not known to be fresh: there may be thousands of others.
        stale = [
            (group, summary)
            for group, summary in self._buffer[known if version == policy_version else 0 :]
            if not self._contract.may_train(
                summary.newest_version if masks else summary.oldest_version, policy_version
            )
        ]
        if stale:
            self._dropped += [summary for _, summary in stale]
            self._remove(stale)
        self._checked = policy_version, len(self._buffer)

    async def _wait_until(self, condition: Callable[[], bool], message: Callable[[], str]) -> None:
        # asyncio.wait_for (3.11) would swallow a cancellation that arrives with the result.
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._changed.wait_for(condition)
        except TimeoutError:
            raise TimeoutError(message()) from None


def _pairs(parts: Sequence[Any]) -> list[_Pair]:
    """Pair each packed group with its summary, which follows it."""
    return list(zip(parts[::2], parts[1::2], strict=True))


def _by_id(pairs: Sequence[_Pair]) -> dict[int, _Pair]:
    return {pair[1].group_id: pair for pair in pairs}
