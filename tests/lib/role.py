"""Stands for a role: the real `Role`, which calls an object in this process, not a Ray actor."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections.abc import Callable, Collection, Iterator
from types import SimpleNamespace
from typing import Any, Protocol

from ray.exceptions import RayActorError, RayTaskError

from grpo_components.cluster.role import RestartBudget, Role
from grpo_components.cluster.role_process import RoleProcess
from grpo_components.errors import RoleFailedError
from grpo_components.settings import Timeouts

NEVER_S = 1e9
"""A time-out that does not come."""


class Scheduler(Protocol):
    """Decides when calls begin, and when their answers arrive."""

    def started(self, host: StandInHost) -> None:
        """A process starts; `host.loop` may get a loop of its own, in place of the driver's."""

    def sent(self, call: RemoteCall) -> None:
        """The driver has made a call, which can `begin` once it has its arguments."""

    def answered(self, call: RemoteCall) -> None:
        """A call has ended; its answer can `arrive`."""


class AtOnce:
    """Makes every call as soon as its arguments are there, and lets the answer arrive at once."""

    def started(self, host: StandInHost) -> None:
        """See `Scheduler.started`."""

    def sent(self, call: RemoteCall) -> None:
        if call.method == "start":
            call.answer({"pid": 0, "node_id": ""})
        elif call.can_begin():
            call.begin()
        else:
            call.task = asyncio.create_task(self._begin_later(call))

    async def _begin_later(self, call: RemoteCall) -> None:
        for given in call.given:
            with contextlib.suppress(Exception):  # `begin` passes it on
                await given
        call.begin()

    def answered(self, call: RemoteCall) -> None:
        call.arrive()


class Reference:
    """Ray's reference to one part of a call's result."""

    def __init__(self, call: RemoteCall, number: int | None) -> None:
        self.call, self.number = call, number

    def __await__(self) -> Iterator[Any]:
        return self._value().__await__()

    async def _value(self) -> Any:
        call = self.call
        waiter = asyncio.get_running_loop().create_future()
        if call.stage == "arrived":
            waiter.get_loop().call_soon(call.settle, waiter)
        else:
            call.waiters.append(waiter)
        return self.value(await waiter)

    def value(self, result: Any) -> Any:
        return result if self.number is None else result[self.number]


class RemoteCall:
    """A call on a role: sent, at work, answered, arrived at the driver."""

    def __init__(self, host: StandInHost, method: str, args: tuple[Any, ...], parts: int) -> None:
        self.host, self.method, self.args = host, method, args
        self.stage = "sent"
        self.result: Any = None
        self.error: BaseException | None = None
        self.waiters: list[asyncio.Future[Any]] = []
        self.references = [Reference(self, None if parts == 1 else n) for n in range(parts)]
        self.name = f"{host.name}.{method}{_shown(args)}"
        """How a schedule shows the call."""
        self.task: asyncio.Task[Any] | None = None

    @property
    def given(self) -> list[Reference]:
        return [arg for arg in self.args if isinstance(arg, Reference)]

    def can_begin(self) -> bool:
        return all(arg.call.stage in ("answered", "arrived") for arg in self.given)

    def begin(self) -> None:
        """Let the role work on the call, in its own loop; nothing if its process has ended."""
        if self.stage != "sent":
            return
        if self.method in self.host.dies_in:
            self.host.end()
            return
        self.stage, values = "at work", []
        for arg in self.args:
            if isinstance(arg, Reference):
                if arg.call.error is not None:
                    self.answer(error=arg.call.error)
                    return
                arg = arg.value(arg.call.result)
            values.append(arg)
        loop = self.host.loop or asyncio.get_running_loop()
        self.task = loop.create_task(self._work(values))
        self.task.add_done_callback(self._finished)

    async def _work(self, values: list[Any]) -> Any:
        function = getattr(self.host.role, self.method)
        if self.host.threads and not asyncio.iscoroutinefunction(function):
            return await asyncio.to_thread(function, *values)
        answer = function(*values)
        return await answer if asyncio.iscoroutine(answer) else answer

    def _finished(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled() or self.stage in ("answered", "arrived"):
            return
        error = task.exception()
        if error is None:
            self.answer(task.result())
        elif isinstance(error, AssertionError) or not isinstance(error, Exception):
            self.answer(error=error)  # the test's own: no restart hides it
        else:
            what, log = f"failed: {type(error).__name__}: {error}", f"{self.host.name}.log"
            kind = "waited" if isinstance(error, TimeoutError) else "raised"
            self.answer(error=RoleFailedError(self.host.name, what, log, kind))

    def answer(self, result: Any = None, error: BaseException | None = None) -> None:
        """Send the result back; it arrives later."""
        if isinstance(error, RoleFailedError):
            error = RayTaskError(self.method, "", error)
        self.stage, self.result, self.error = "answered", result, error
        self.host.scheduler.answered(self)

    def arrive(self) -> None:
        self.stage = "arrived"
        self.host.calls.remove(self)
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            waiter.get_loop().call_soon(self.settle, waiter)

    def settle(self, waiter: asyncio.Future[Any]) -> None:
        if waiter.done():
            return
        if self.error is not None:
            waiter.set_exception(self.error)
        else:
            waiter.set_result(self.result)


class StandInHost:
    """Stands for the process of a role, with the methods of a Ray actor that `Role` uses."""

    numbers = itertools.count()

    def __init__(
        self,
        scheduler: Scheduler,
        name: str,
        build: Callable[[], Any],
        *,
        threads: bool = False,
        dies_in: Collection[str] = (),
    ) -> None:
        self.scheduler, self.name, self.alive = scheduler, name, True
        self.threads, self.dies_in, self.role = threads, dies_in, build()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.calls: list[RemoteCall] = []
        """Calls whose answers have not arrived at the driver."""
        self.received: list[str] = []
        """The methods that were called."""
        number = next(self.numbers)
        self._actor_id = SimpleNamespace(hex=lambda: f"{number}")
        self.call = SimpleNamespace(options=self._options)
        self.heartbeat = SimpleNamespace(remote=self._heartbeat)
        self.start = SimpleNamespace(remote=lambda: self.send("start", (), 1)[0])
        scheduler.started(self)

    def _options(self, num_returns: int) -> Any:
        def remote(method: str, lane: str, *args: Any) -> Any:
            self.received.append(method)
            made = self.send(method, args, num_returns)
            return made[0] if num_returns == 1 else made

        return SimpleNamespace(remote=remote)

    def _heartbeat(self, interval_s: float) -> Reference:
        # A check answers as soon as it is asked; the watch's answer comes never, or with the death.
        call = RemoteCall(self, "heartbeat", (), 1)
        self.calls.append(call)
        if interval_s and self.alive:
            call.stage = "at work"
            return call.references[0]
        call.answer({}, None if self.alive else self._death())
        if call.stage != "arrived":
            call.arrive()
        return call.references[0]

    def send(self, method: str, args: tuple[Any, ...], parts: int) -> list[Reference]:
        call = RemoteCall(self, method, args, parts)
        self.calls.append(call)
        if self.alive:
            self.scheduler.sent(call)
        else:
            call.answer(error=self._death())
        return call.references

    def end(self, answers: int = 0) -> None:
        """End the process: its calls fail, except the first `answers` that are answered already."""
        if not self.alive:
            return
        self.alive = False
        sent = [call for call in self.calls if call.stage == "answered"][:answers]
        for call in list(self.calls):
            if call not in sent:
                if call.task is not None:
                    call.task.cancel()
                call.answer(error=self._death())
        self.role = None

    def _death(self) -> RayActorError:
        return RayActorError(self._actor_id.hex(), "the process died")


def stand_in_role(
    name: str,
    role: Any,
    scheduler: Scheduler | None = None,
    *,
    threads: bool = False,
    dies_in: Collection[str] = (),
    max_restarts: int = 8,
    **options: Any,
) -> Role:
    """Return a `Role` whose processes are objects in this one.

    `process.host` is the `StandInHost` of the present process, whose `end` kills it.
    """
    scheduler = scheduler or AtOnce()

    def start_process(incarnation: int) -> RoleProcess:
        fatal = () if incarnation else dies_in
        build = role if callable(role) else lambda: role
        host = StandInHost(scheduler, name, build, threads=threads, dies_in=fatal)
        starting = host.start.remote() if incarnation else None
        return RoleProcess(incarnation, host, starting, kill_host=StandInHost.end)

    def ignore(*_: Any, **__: Any) -> None:
        pass

    async def nothing(*_: Any) -> None:
        await asyncio.sleep(0)

    nobody = {"note": ignore, "record": ignore, "started": ignore, "names": {}, "why_no_room": str}
    alone = {"can_spare": bool, "restarts_alone": True, "recover": nothing, "pause": nothing}
    budget = RestartBudget(max_restarts, math.inf)
    arguments = {"budget": budget, **alone, **nobody, **options}
    made = Role(name, f"/nowhere/{name}.log", start_process, **arguments)
    made._start_timeout_s = NEVER_S  # `ready` would set it
    return made


def limits(seconds: float = 9.0, **others: float) -> Timeouts:
    """Return `Timeouts` that are all of these seconds, except for those given by name."""
    return Timeouts.model_construct(None, **dict.fromkeys(Timeouts.model_fields, seconds) | others)


def waits_of(role: Role) -> list[tuple[str, float]]:
    """Return a list that gets what the role waits for from now on, with time-outs in seconds."""
    waits, answer = [], role.answer

    def noted(part: Any, what: str, timeout_s: float) -> Any:
        waits.append((what, timeout_s))
        return answer(part, what, timeout_s)

    role.answer = noted
    return waits


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
