"""Sends weights from the first trainer rank to a generator through vLLM's transfer engines.

The trainer reads a published snapshot from the object store and sends it; the generator receives it
between two engine steps. The driver makes the calls by which vLLM's sender and receiver agree, and
so sees either one fail. The weights themselves do not pass through the driver.
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
"""Extra seconds that the driver waits: a role's own time-out, a clearer error, comes first."""
_LINKS = "links"
"""Lane (thread) of the sender's quick calls, which do not wait for a training step."""


class WeightTransfer:
    """Loads weights into generators: the trainer sends them directly to their workers."""

    def __init__(self, sender: Role, timeouts: Timeouts) -> None:
        self._sender, self._limit_s = sender, timeouts.weights_s + _GRACE_S
        self._numbers = count()
        self._turn = asyncio.Lock()
        """Held during a transfer. Concurrent transfers would share two CUDA streams of vLLM, and
        each would take its own buffers on the sender's GPU. Time-outs start once it is held."""

    async def load(
        self, receiver: Role, version: int, buckets: Sequence[Any], manifests: Sequence[Any]
    ) -> LoadedWeights | None:
        """Load one published snapshot into a generator; one transfer runs at a time.

        If a transfer breaks, the generator is restarted, because its model is half loaded, and then
        pulls again. Only if the sender dies, or its call times out, do the loops end.
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
        """Send the snapshot; return an awaitable: the receiver's result, or the failure."""
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
            if not received.done():  # the receiver waits in vain
                return _failed(receiver.name, f"got no weights: {failure}")
        finally:
            if not is_whole:
                sender.submit("abandon_send", *link, lane=_LINKS)
        return receiving


async def _failed(role: str, what: str) -> Any:
    raise RoleFailedError(role, what, "", "raised")


async def _unless_failed(received: asyncio.Task[Any], work: Awaitable[Any]) -> Any:
    """Wait for the result of work; raise the receiver's failure if that comes first."""
    working = _task(work)
    await asyncio.wait((working, received), return_when=asyncio.FIRST_COMPLETED)
    if not working.done():
        received.result()
    return await working


def _task(work: Awaitable[Any]) -> asyncio.Task[Any]:
    """Start a task whose error asyncio does not log if nobody retrieves it."""
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    assert isinstance(task, asyncio.Task)
    return task
