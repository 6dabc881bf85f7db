"""Brings weights from the first trainer rank into a generator through vLLM's transfer engines.

The trainer reads a published snapshot from the object store and sends it; the generator receives it
between two engine steps. Neither knows the other: the calls that vLLM's sender makes to its
receiver go through the driver, which sees both fail. The bytes do not.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Sequence
from itertools import count
from typing import Any

from grpo_components.cluster.role import Role
from grpo_components.errors import RoleFailedError
from grpo_components.exchange.weight_probe import LoadedWeights

_GRACE_S = 30.0
"""Seconds added to the roles' own time-outs, so that a role's own, clearer error comes first."""


class WeightTransfer:
    """Makes pulls in which weights go directly from the trainer to the generators' workers."""

    def __init__(self, sender: Role, timeout_s: float) -> None:
        self._sender, self._timeout_s = sender, timeout_s
        self._limit_s = timeout_s + _GRACE_S
        self._numbers = count()
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """Lock of each generator: its pulls may overlap in a replay, but it has one NCCL group."""

    async def load(
        self, receiver: Role, version: int, buckets: Sequence[Any], manifests: Sequence[Any]
    ) -> LoadedWeights | None:
        """Load one published snapshot into a generator.

        If a transfer breaks, the generator is restarted, because its model is half loaded, and then
        pulls again. Only the end of the sender, or a time-out, ends the loops.
        """
        async with self._turns[receiver.name]:
            if receiver.is_restarting:
                return await receiver.restarted()
            number, process = next(self._numbers), receiver.process
            announced = (version, number, self._sender.name, self._timeout_s, *manifests)
            receiving = receiver.submit("receive_weights", *announced)
            whole = await self._transfer(number, receiver, receiving, buckets)
        limit_s = self._limit_s if whole else _GRACE_S
        # Without the lock: if this restarts the generator, the restart pulls.
        return await receiver.outcome(receiving, process, "load_weights", limit_s)

    async def _transfer(
        self, number: int, receiver: Role, receiving: Any, buckets: Sequence[Any]
    ) -> bool:
        """Send the snapshot; return whether the receiver got it: if not, it must be restarted."""
        incarnation, sender = receiver.process.incarnation, self._sender
        link, to = f"{receiver.name}.{incarnation}", (number, receiver.name)
        sending = sender.submit("send_weights", *to, incarnation, *buckets, lane=f"send {link}")
        received = _task(receiver.answer(receiving, "load_weights", self._limit_s))
        reason = "the run went back to a checkpoint, or ended"
        try:
            await self._relay(to, receiver, received)
            await sender.answer(sending, "send_weights", self._limit_s)
            reason = ""
        except RoleFailedError as failure:
            reason = str(failure).splitlines()[0]
            if failure.role == sender.name and failure.kind != "raised":
                raise
        finally:
            if reason:
                sender.submit("abandon_send", *to, reason, lane="abandon")
                if not receiver.is_restarting:
                    receiver.submit("abandon_weights", number, reason)
        return not reason

    async def _relay(
        self, to: tuple[int, str], receiver: Role, received: asyncio.Task[Any]
    ) -> None:
        """Pass the sender's calls on to the receiver, until there are no more."""
        sender, answered, process = self._sender, False, receiver.process
        lane = f"relay {receiver.name}.{process.incarnation}"
        while True:
            asked = sender.submit("next_request", *to, answered, lane=lane)
            request = await _unless_failed(
                received, sender.answer(asked, "next_request", self._limit_s)
            )
            if request is None:
                return
            if receiver.is_restarting or receiver.process is not process:
                raise RoleFailedError(receiver.name, "is being restarted", "", "died")
            made = receiver.submit("answer_request", to[0], *request)
            await _unless_failed(received, receiver.answer(made, "answer_request", self._limit_s))
            answered = True


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
