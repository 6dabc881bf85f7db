"""Brings weights from the first trainer rank into a generator through vLLM's transfer engines.

The trainer reads a published snapshot from the object store and sends it; the generator receives it
between two engine steps. Neither knows the other: the calls that vLLM's sender makes to its
receiver go through the driver, which sees both fail. The bytes do not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from itertools import count
from typing import Any

from grpo_components.cluster.role import Role
from grpo_components.errors import RoleFailedError
from grpo_components.exchange.weight_probe import LoadedWeights
from grpo_components.settings import Timeouts

_GRACE_S = 30.0
"""Seconds added to the roles' own time-outs, so that a role's own, clearer error comes first."""
_LINKS = "links"
"""Lane of the sender's quick calls, which do not wait for a step."""


class WeightTransfer:
    """Makes pulls in which weights go directly from the trainer to the generators' workers."""

    def __init__(self, sender: Role, timeouts: Timeouts) -> None:
        self._sender, self._limit_s = sender, timeouts.weights_s + _GRACE_S
        self._numbers = count()
        self._turn = asyncio.Lock()
        """Held during a transfer. Transfers side by side would share two CUDA streams of vLLM, and
        each would take its own buffers on the sender's GPU. Time-outs start with the turn."""

    async def load(
        self, receiver: Role, version: int, buckets: Sequence[Any], manifests: Sequence[Any]
    ) -> LoadedWeights | None:
        """Load one published snapshot into a generator, when it is its turn.

        If a transfer breaks, the generator is restarted, because its model is half loaded, and then
        pulls again. Only the end of the sender, or a time-out, ends the loops.
        """
        loaded = None
        async with self._turn:
            process = receiver.process
            if not receiver.is_restarting:
                loaded = await self._transfer(receiver, version, buckets, manifests)
        # Without the lock, because a restart pulls.
        if loaded is None:
            return await receiver.restarted()
        return await receiver.outcome(loaded, process, "load_weights", self._limit_s)

    async def _transfer(
        self, receiver: Role, version: int, buckets: Sequence[Any], manifests: Sequence[Any]
    ) -> Awaitable[LoadedWeights]:
        """Send the snapshot; return what to wait for: the receiver's result, or the failure."""
        sender, number = self._sender, next(self._numbers)
        link = receiver.name, receiver.process.incarnation
        group = sender.submit("transfer_group", *link, lane=_LINKS)
        receiving = receiver.submit("receive_weights", version, number, group, *manifests)
        awaited = receiver.submit("weights_awaited", number)
        received = _task(receiver.answer(receiving, "load_weights", self._limit_s))
        is_whole = False
        try:
            ready = receiver.answer(awaited, "weights_awaited", self._limit_s)
            await _unless_failed(received, ready)
            lane = f"send {receiver.name}.{receiver.process.incarnation}"
            sending = sender.submit("send_weights", receiver.name, *buckets, lane=lane)
            sent = sender.answer(sending, "send_weights", self._limit_s)
            await _unless_failed(received, sent)
            is_whole = True
        except RoleFailedError as failure:
            if failure.role == sender.name and failure.kind != "raised":
                raise
            if not received.done():  # it waits in vain
                return _failed(receiver.name, f"got no weights: {failure}")
        finally:
            if not is_whole:
                sender.submit("abandon_send", *link, lane=_LINKS)
        return receiving


async def _failed(role: str, what: str) -> Any:
    raise RoleFailedError(role, what, "", "raised")


async def _unless_failed(received: asyncio.Task[Any], work: Awaitable[Any]) -> Any:
    """Return the result of work, or raise the receiver's failure if that comes first."""
    working = _task(work)
    await asyncio.wait((working, received), return_when=asyncio.FIRST_COMPLETED)
    if not working.done():
        received.result()
    return await working


def _task(work: Awaitable[Any]) -> asyncio.Task[Any]:
    """Return a task whose error need not be retrieved."""
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    assert isinstance(task, asyncio.Task)
    return task
