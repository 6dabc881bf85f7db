"""Sends weights from the first trainer rank to a generator through vLLM's transfer engines.

The trainer reads a published snapshot from the object store and sends it; the generator receives it
between two engine steps. The driver coordinates vLLM's sender and receiver, and so notices if
either fails. The weights themselves do not pass through the driver.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Sequence
from itertools import count
from typing import Any

from grpo_components.cluster.role import Role
from grpo_components.cluster.supervision import quiet_task
from grpo_components.errors import RoleFailedError
from grpo_components.exchange.weight_probe import LoadedWeights
from grpo_components.settings import Timeouts

GRACE_S = 30.0
"""Extra seconds that the driver waits, so that a role's clearer time-out error comes first."""
_LINKS = "links"
"""Name of the sender's thread that prepares and abandons transfers, also during a training step."""


class WeightTransfer:
    """Loads weights into generators: one trainer rank sends them to the workers of an engine."""

    def __init__(self, sender: Role, timeouts: Timeouts) -> None:
        self._sender, self._limit_s = sender, timeouts.weights_s + GRACE_S
        self._numbers = count()
        self._turn = asyncio.Lock()
        """Lock that lets one transfer run at a time: several would share two CUDA streams of vLLM,
        and each would take buffers on the sender's GPU. Time-outs start once it is held."""

    async def load(
        self, receiver: Role, version: int, buckets: Sequence[Any], manifests: Sequence[Any]
    ) -> LoadedWeights | None:
        """Load a published snapshot of the weights into a generator, once no other transfer runs.

        If the transfer breaks, the model is half loaded: the generator is restarted, pulls again,
        and None is returned. If the sender dies, or its call times out, the loops end.
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
        """Send a snapshot; await the returned object for the receiver's result or failure."""
        sender, number = self._sender, next(self._numbers)
        link = receiver.name, receiver.process.incarnation
        group = sender.submit("transfer_group", *link, lane=_LINKS)
        receiving = receiver.submit("receive_weights", version, number, group, *manifests)
        awaited = receiver.submit("weights_awaited", number)
        received = quiet_task(receiver.answer(receiving, "load_weights", self._limit_s))
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


async def _unless_failed(received: asyncio.Task[Any], work: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of `work`; if the receiving task fails before it, raise that failure."""
    working = quiet_task(work)
    await asyncio.wait((working, received), return_when=asyncio.FIRST_COMPLETED)
    if not working.done():
        received.result()
    return await working
