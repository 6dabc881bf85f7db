"""Stands for Ray: processes of roles, calls on them, and answers, each step when it is chosen."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from interleavings.controlled_loops import ControlledLoop
from interleavings.roles import BrokenRule
from ray.exceptions import RayActorError, RayTaskError

from grpo_components.errors import RoleFailedError

PURE = {
    *("gather_weights", "train_step", "hold_state", "write_state", "load_state", "read_state"),
    *("export_weights", "add_logprobs", "acknowledge", "begin_attempt", "refill", "start"),
}
"""Calls whose work nobody sees before the caller has the answer: both are one step."""
WITH_PARTS = {"add", "load_weights"}
"""Calls that wait for another role's result, and may be overtaken meanwhile: a step of their own.

All others reach their role in the order in which the driver sends them, so that they can begin when
they are sent: no other role sees what they change.
"""


class Reference:
    """Ray's reference to one part of a call's result."""

    def __init__(self, call: RemoteCall, number: int | None) -> None:
        self.call, self.number = call, number

    def __await__(self) -> Iterator[Any]:
        return self._value().__await__()

    async def _value(self) -> Any:
        call = self.call
        waiter = call.host.world.driver.create_future()
        if call.stage == "arrived":
            call.host.world.driver.call_soon(call.settle, waiter)
        else:
            call.waiters.append(waiter)
        return self.value(await waiter)

    def value(self, result: Any) -> Any:
        """Return this part of the call's result."""
        return result if self.number is None else result[self.number]


class RemoteCall:
    """A call on a role: sent, at work, answered, arrived at the driver.

    Args:
        host: process that gets the call.
        method: its method.
        args: its arguments; a `Reference` among them arrives as its value.
        parts: number of parts of its result.
    """

    def __init__(self, host: Process, method: str, args: tuple[Any, ...], parts: int) -> None:
        self.host, self.method, self.args = host, method, args
        self.stage = "sent"
        self.result: Any = None
        self.error: Exception | None = None
        self.waiters: list[asyncio.Future[Any]] = []
        whole = parts == 1
        self.references = [Reference(self, None if whole else n) for n in range(parts)]
        self.name = f"{host.name}.{method}{_shown(args)}"
        """What a schedule shows."""
        self.task: asyncio.Task[Any] | None = None

    def can_begin(self) -> bool:
        """Return whether the role has all arguments."""
        given = [arg.call for arg in self.args if isinstance(arg, Reference)]
        return all(call.stage in ("answered", "arrived") for call in given)

    def begin(self) -> None:
        """Let the role work on the call, as far as it gets."""
        self.stage, values = "at work", []
        for arg in self.args:
            if isinstance(arg, Reference):
                if arg.call.error is not None:
                    self.answer(error=arg.call.error)
                    return
                arg = arg.value(arg.call.result)
            values.append(arg)
        self.task = self.host.loop.create_task(self._work(values))
        self.task.add_done_callback(self._finished)
        self.host.loop.run_all()

    async def _work(self, values: list[Any]) -> Any:
        answer = getattr(self.host.role, self.method)(*values)
        return await answer if asyncio.iscoroutine(answer) else answer

    def _finished(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled() or self.stage in ("answered", "arrived"):
            return
        error = task.exception()
        if error is None:
            self.answer(task.result())
            return
        if isinstance(error, BrokenRule):
            self.host.world.broken = error
            return
        what, log = f"failed: {type(error).__name__}: {error}", f"{self.host.name}.log"
        kind = "waited" if isinstance(error, TimeoutError) else "raised"
        self.answer(error=RoleFailedError(self.host.name, what, log, kind))

    def answer(self, result: Any = None, error: Any = None) -> None:
        """Send the result back; it arrives later."""
        if isinstance(error, RoleFailedError):
            error = RayTaskError(self.method, "", error)
        self.stage, self.result, self.error = "answered", result, error

    def arrive(self) -> None:
        """Let the driver have the answer."""
        self.stage = "arrived"
        self.host.calls.remove(self)
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            self.host.world.driver.call_soon(self.settle, waiter)

    def settle(self, waiter: asyncio.Future[Any]) -> None:
        """Give the answer to one who waits."""
        if waiter.done():
            return
        if self.error is not None:
            waiter.set_exception(self.error)
        else:
            waiter.set_result(self.result)


class Process:
    """Process of a role, with the methods of a Ray actor that `Role` uses.

    Args:
        world: has the driver's loop, and the list of all processes.
        name: name of the role.
        build: function that builds the role in it, or its stand-in.
    """

    numbers = itertools.count()

    def __init__(self, world: Any, name: str, build: Callable[[], Any]) -> None:
        self.world, self.name, self.alive = world, name, True
        self.loop, self.role = ControlledLoop(), build()
        self.calls: list[RemoteCall] = []
        """Those that have not arrived back."""
        number = next(self.numbers)
        self._actor_id = SimpleNamespace(hex=lambda: f"{number}")
        self.call = SimpleNamespace(options=self._options)
        self.heartbeat = SimpleNamespace(remote=self._heartbeat)
        self.start = SimpleNamespace(remote=lambda: self.send("start", (), 1)[0])
        world.processes.append(self)

    def _options(self, num_returns: int) -> Any:
        def remote(method: str, lane: str, *args: Any) -> Any:
            made = self.send(method, args, num_returns)
            return made[0] if num_returns == 1 else made

        return SimpleNamespace(remote=remote)

    def _heartbeat(self, interval_s: float) -> Reference:
        # A check answers as soon as it is asked; the watch's answer comes never, or with the death.
        call = RemoteCall(self, "heartbeat", (), 1)
        if interval_s and self.alive:
            call.stage = "at work"
            self.calls.append(call)
            return call.references[0]
        self.calls.append(call)
        call.answer({}, None if self.alive else self._death())
        call.arrive()
        return call.references[0]

    def send(self, method: str, args: tuple[Any, ...], parts: int) -> list[Reference]:
        """Send a call; see `RemoteCall`."""
        call = RemoteCall(self, method, args, parts)
        self.calls.append(call)
        if not self.alive:
            call.answer(error=self._death())
        elif method not in PURE and method not in WITH_PARTS:
            call.begin()
        return call.references

    def end(self, answers: int = 0) -> None:
        """End the process: its calls fail, and their failures are on the way to the driver.

        Args:
            answers: number of answers, of those that have not arrived, that it still sent.
        """
        if not self.alive:
            return
        self.alive = False
        sent = [call for call in self.calls if call.stage == "answered"][:answers]
        for call in self.calls:
            if call not in sent:
                call.answer(error=self._death())
        self.role = None

    def _death(self) -> RayActorError:
        return RayActorError(self._actor_id.hex(), "the process died")


def _shown(args: tuple[Any, ...]) -> str:
    """Return the arguments that tell one call from another."""
    shown = [_one(arg) for arg in args]
    return f"({', '.join(text for text in shown if text)})"


def _one(arg: Any) -> str:
    if isinstance(arg, bool) or arg is None:
        return ""
    if isinstance(arg, int | str):
        return f"{arg}"
    if isinstance(arg, Reference):
        return arg.call.name.partition(".")[2] if arg.number in (None, 0) else ""
    return ""
