"""The driver's handle of one role, through all lives of its process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayError, RayTaskError

from grpo_components.cluster.calls import Call, Part
from grpo_components.cluster.restarts import RestartBudget
from grpo_components.cluster.role_host import DUMP_STACKS
from grpo_components.cluster.supervision import dump_task_stacks
from grpo_components.errors import RoleFailedError, RoleLostError

_DUMP_S = 0.5
"""What a silent process gets to write down where it is, before it is killed."""
_ANSWERS_OF_THE_DEAD_S = 60.0


@dataclass
class Family:
    """Roles that can stand in for each other."""

    min_living: int
    """With so many others left, one that cannot be restarted is given up."""
    roles: list[Role] = field(default_factory=list)

    def can_spare(self, role: Role) -> bool:
        """Whether the run goes on without this one."""
        return sum(not other.lost for other in self.roles if other is not role) >= self.min_living


class Role:
    """One role of a run.

    Where its process dies, falls silent or raises, it is restarted within the run's budget, and
    the calls that were under way are made again: who waits for their results only waits longer.

    Args:
        name: of the role.
        log_file: its log.
        start_host: makes, for which of its lives, the Ray actor that holds it, and the reference of
            what its start returns.
        budget: of restarts, of the run.
        note: told of each restart, in words.
        record: told of each restart, for the event log.
        started: told name, pid and node of each life.
        family: it can be given up where enough of these live; None for a role that is needed.
        restarts_alone: whether the others can go on while it is restarted.
        remembers: the last call of this method is made again in each new life.
        names: of the roles by the ids of their Ray actors; this role adds its own.
    """

    def __init__(
        self,
        name: str,
        log_file: str,
        start_host: Callable[[int], tuple[Any, Any]],
        *,
        budget: RestartBudget,
        note: Callable[[str], None],
        record: Callable[..., None],
        started: Callable[[str, dict[str, Any]], None],
        family: Family | None = None,
        restarts_alone: bool = True,
        remembers: str | None = None,
        names: dict[str, str],
    ) -> None:
        self.name, self.lost = name, False
        self.recover: Callable[[], Awaitable[None]] | None = None
        """Brings a restarted role to where it has to be, before anybody else calls it."""
        self._log_file, self._start_host = log_file, start_host
        self._budget, self._note, self._record, self._started = budget, note, record, started
        self._family, self._restarts_alone = family, restarts_alone
        if family is not None:
            family.roles.append(self)
        self._remembers, self._names = remembers, names
        self._last: Call | None = None
        self._raised: dict[str, str] = {}
        """By method: what its calls raised last, since one of them was answered."""
        self._life, self._start_timeout_s = -1, 0.0
        self._over = asyncio.Event()
        """Set when this life has ended and the next begins."""
        self._start_life()
        self._restarting: asyncio.Task[None] | None = None
        self._waiting = 0
        self._nobody_waits = asyncio.Event()
        self._nobody_waits.set()

    def submit(
        self,
        method: str,
        *args: Any,
        num_returns: int = 1,
        lane: str = "main",
        once: bool = False,
    ) -> Any:
        """Start a call without waiting for it.

        Args:
            method: of the role.
            args: for it; parts at top level arrive as their values, so that what one role returned
                goes to another without passing through the driver.
            num_returns: parts of the returned tuple to have.
            lane: thread for a blocking method; another lane runs beside the main one.
            once: not made again after a restart, whose recovery does more than it would have done:
                its result is None then.

        Returns:
            A `Part`, or a list of `num_returns`.
        """
        call = Call(self.name, method, args, num_returns, lane, once)
        if not self._must_wait():
            call.make(self._host, self._life)
        parts = [Part(call, number) for number in range(num_returns)]
        return parts[0] if num_returns == 1 else parts

    async def result(
        self,
        part: Part,
        what: str,
        timeout_s: float,
        turn: Callable[[], Awaitable[Any]] | None = None,
    ) -> Any:
        """Wait for a call's result, over restarts of the role.

        Args:
            part: of the call.
            what: it is, for the error.
            timeout_s: longest wait.
            turn: of a replay, waited for before the result counts: a restart may still lose it.

        Raises:
            RoleFailedError: naming the role that failed and could not be restarted.
            RoleLostError: if the role was given up.
        """
        call = part.call
        assert call.role == self.name, f"{call.method} is a call of {call.role}, not {self.name}"
        while True:
            await self._restarted()
            if self.lost:
                raise RoleLostError(self.name)
            if call.once and call.life != self._life:
                return None
            call.make(self._host, self._life)
            try:
                answer = await self.answer(part, what, timeout_s)
            except RoleFailedError as failure:
                repeated = failure.what in (call.raised, self._raised.get(call.method))
                call.raised = failure.what
                if failure.kind == "raised":
                    self._raised[call.method] = failure.what
                await self._failed(failure, call.life, repeated=repeated)
            else:
                if turn is not None and not await self._came(turn, call.life):
                    continue
                self._raised.pop(call.method, None)
                if call.method == self._remembers:
                    self._last = call
                return answer

    async def call(
        self,
        method: str,
        *args: Any,
        timeout_s: float,
        lane: str = "main",
        turn: Callable[[], Awaitable[Any]] | None = None,
    ) -> Any:
        """Call a method and wait for its result; see `submit` and `result`."""
        return await self.result(self.submit(method, *args, lane=lane), method, timeout_s, turn)

    async def answer(self, part: Part | Awaitable[Any], what: str, timeout_s: float) -> Any:
        """Wait for what was returned already, or is about to be, without making its call again.

        Args:
            part: of a call, or Ray's reference of one.
            what: it is, for the error.
            timeout_s: longest wait.

        Raises:
            RoleFailedError: naming the role whose code failed, or that did not answer in time.
        """
        self._waiting += 1
        self._nobody_waits.clear()
        # asyncio.wait_for swallows a cancellation that comes with the result (Python 3.11).
        try:
            async with asyncio.timeout(timeout_s):
                return await (part.call.reference(part.number) if isinstance(part, Part) else part)
        except TimeoutError:
            problem = f"did not answer {what} within {timeout_s:g} s"
            dump_task_stacks(Path(self._log_file).parent, f"{self.name} {problem}")
            raise RoleFailedError(self.name, problem, self._log_file, "silent") from None
        except RayError as error:
            raise self._failure(error, what) from error
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._nobody_waits.set()

    async def ready(self, timeout_s: float) -> None:
        """Wait until the role is built; where its process ends before that, it gets another.

        Raises:
            RoleFailedError: if it cannot be built, or takes too long.
        """
        self._start_timeout_s, life = timeout_s, self._life
        try:
            await self._built()
        except RoleFailedError as failure:
            if failure.kind != "died":  # what is wrong with it is wrong the next time, too
                raise
            await self._failed(failure, life)

    async def watch(
        self, interval_s: float, patience_s: float, beat: Callable[[str, dict[str, Any]], None]
    ) -> None:
        """Restart the role as soon as its process is gone or silent; ends when it is given up.

        Args:
            interval_s: between two heartbeats.
            patience_s: a heartbeat that is so much later is silence.
            beat: told at each heartbeat what the process uses.

        Raises:
            RoleFailedError: if it cannot be restarted.
        """
        while not self.lost:
            await self._restarted()
            life, host = self._life, self._host
            try:
                async with asyncio.timeout(interval_s + patience_s):
                    use = await host.heartbeat.remote(interval_s)
            except TimeoutError:
                problem = f"gave no sign of life for {patience_s:g} s"
                failure = RoleFailedError(self.name, problem, self._log_file, "silent")
                await self._failed(failure, life)
            except RayError as error:
                await self._failed(self._failure(error, "lives"), life)
            else:
                beat(self.name, use)

    async def cause_of_failure(self, patience_s: float) -> RoleFailedError | None:
        """What is wrong with the role's process itself; None where it answers."""
        try:
            await self.answer(self._host.heartbeat.remote(0.0), "a sign of life", patience_s)
        except RoleFailedError as failure:
            return failure
        return None

    async def restart_as(self, what: str) -> None:
        """Kill the process and start another, as in the run that is replayed.

        Args:
            what: had happened to it there.
        """
        await self._failed(RoleFailedError(self.name, what, self._log_file, "died"), self._life)

    async def begin_again(self) -> None:
        """Start anew, without recovering anything, once nobody waits for the role any more."""
        await self.settled()
        await self._end_life()
        self._last = None
        self._start_life()
        await self._built()

    async def settled(self) -> None:
        """Wait until no restart is under way, however it ends."""
        if self._restarting is not None:
            await asyncio.wait([self._restarting])

    async def close(self, timeout_s: float) -> None:
        """Let the role end its own processes."""
        if not self.lost:
            await self.answer(self._host.close.remote(), "close", timeout_s)

    def kill(self) -> None:
        """End the role's process, also one that is stopped."""
        with contextlib.suppress(RayError):
            ray.kill(self._host)
        self._signal(signal.SIGKILL)

    async def _built(self) -> None:
        identity = await self.answer(self._starting, "its start", self._start_timeout_s)
        self._pid = identity["pid"] if identity["node"] == socket.gethostname() else 0
        self._started(self.name, identity)

    async def _came(self, turn: Callable[[], Awaitable[Any]], life: int) -> bool:
        """Wait for a turn; False where that life of the role ends before it."""
        if life != self._life:
            return False
        waiting = asyncio.ensure_future(turn())
        over = asyncio.create_task(self._over.wait())
        try:
            await asyncio.wait({waiting, over}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            over.cancel()
            came = waiting.done() or not waiting.cancel()
        if came:
            waiting.result()
        return came

    def _must_wait(self) -> bool:
        """Whether a restart is under way that the caller is not part of."""
        return self._restarting is not None and asyncio.current_task() is not self._restarting

    async def _restarted(self) -> None:
        while self._must_wait():
            assert self._restarting is not None
            await asyncio.shield(self._restarting)

    async def _failed(self, failure: RoleFailedError, life: int, *, repeated: bool = False) -> None:
        """Have the role restarted, where its life is still that one; else raise the failure."""
        another = failure.role != self.name  # whose result this role should have got
        if another or not self._restarts_alone or asyncio.current_task() is self._restarting:
            raise failure
        if self._restarting is None and life == self._life and not self.lost:
            self._restarting = asyncio.create_task(self._restart(failure, repeated))
        await self._restarted()

    async def _restart(self, failure: RoleFailedError, repeated: bool) -> None:
        began = time.monotonic()
        try:
            while True:
                try:
                    pause_s = self._budget.spend(failure, repeated=repeated)
                except RoleFailedError as final:
                    if self._family is None or not self._family.can_spare(self):
                        raise
                    self.lost = True
                    self._note(f"{self.name} is given up: it {final.what}")
                    await self._end_life()
                    self._record("restart", role=self.name, what=final.what, given_up=True)
                    return
                self._note(f"{self.name} {failure.what}; starting it again ({self._budget.used()})")
                if failure.kind == "silent":
                    self._signal(DUMP_STACKS)
                    await asyncio.sleep(_DUMP_S)
                await self._end_life()
                # Now, when all that it has answered has been told of.
                self._record("restart", role=self.name, what=failure.what, given_up=False)
                await asyncio.sleep(pause_s)
                self._start_life()
                try:
                    await self._built()
                    if self._last is not None:
                        self._last.make(self._host, self._life)
                        await self.answer(self._last.reference(0), self._last.method, 60)
                    if self.recover is not None:
                        await self.recover()
                except RoleFailedError as again:
                    if again.role != self.name:
                        raise
                    repeated, failure = again.what == failure.what, again
                else:
                    self._note(f"{self.name} is back after {time.monotonic() - began:.0f} s")
                    return
        finally:
            self._restarting = None

    async def _end_life(self) -> None:
        """End the process, and let those go first who have got its last answers."""
        self.kill()
        try:
            async with asyncio.timeout(_ANSWERS_OF_THE_DEAD_S):
                await self._nobody_waits.wait()
        except TimeoutError:
            problem = f"was killed, and its calls did not end within {_ANSWERS_OF_THE_DEAD_S:g} s"
            raise RoleFailedError(self.name, problem, self._log_file, "waited") from None

    def _start_life(self) -> None:
        self._life += 1
        self._over.set()
        self._over = asyncio.Event()
        self._pid = 0  # not known yet
        self._host, self._starting = self._start_host(self._life)
        self._names[self._host._actor_id.hex()] = self.name

    def _signal(self, number: int) -> None:
        if self._pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, number)

    def _failure(self, error: RayError, what: str) -> RoleFailedError:
        cause: Any = error
        while isinstance(cause, RayTaskError):
            cause = cause.cause
        if isinstance(cause, RoleFailedError):
            return cause
        if isinstance(cause, RayActorError):
            name = self._names.get(cause.actor_id or "", self.name)
            log = str(Path(self._log_file).with_name(f"{name}.log"))
            return RoleFailedError(name, _cause_of_death(cause), log, "died")
        if isinstance(cause, OutOfMemoryError):
            return RoleFailedError(self.name, _out_of_memory(cause), self._log_file, "died")
        return RoleFailedError(self.name, f"failed in {what}: {error}", self._log_file, "raised")


def _out_of_memory(error: OutOfMemoryError) -> str:
    """The figures that Ray's page of text begins with."""
    found = re.search(r"was (\S+) used / (\S+) limit", str(error))
    figures = f", {found[1]} of {found[2]} in use" if found else ""
    return f"died: killed because the machine's memory was full{figures}"


def _cause_of_death(error: RayActorError) -> str:
    """What Ray knows of it: the kind of exit, and its first words on why."""
    told = " ".join(str(error).split())
    found = re.search(r"exit type: (\w+) Worker exit detail: (.+?\.)( |$)", told)
    if found is None:
        return f"died: {told}"
    if found[1] == "SYSTEM_ERROR":  # the rest only tells that its connection broke off
        return "died: killed, out of memory, or crashed"
    return f"died: {found[1]}: {found[2]}"
