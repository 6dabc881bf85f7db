"""The driver's side of one role: calls it, watches its process and restarts it."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from ray.exceptions import (
    ActorUnavailableError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
)

from grpo_components.cluster.calls import Call, Part
from grpo_components.cluster.restarts import Family, RestartBudget
from grpo_components.cluster.role_host import DUMP_STACKS
from grpo_components.cluster.role_process import RoleProcess
from grpo_components.cluster.supervision import dump_task_stacks
from grpo_components.errors import RoleFailedError, RoleLostError

_STACK_DUMP_S = 0.5
"""Grace period for a hung process to dump its stacks, in seconds."""
_ANSWER_S = 5.0
"""Longest wait for a process to show that it lives, in seconds."""
_PENDING_CALLS_S = 60.0
"""Longest wait for the pending calls of a killed process to fail, in seconds."""


class Role:
    """Calls one role of a run, and replaces the role's process when it fails.

    If the process dies, hangs or raises, it is restarted within the run's budget and the pending
    calls are repeated: those who wait for a result only wait longer.
    """

    def __init__(
        self,
        name: str,
        log_file: str,
        start_process: Callable[[int], RoleProcess],
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
        self.name, self.lost, self.restarts_alone = name, False, restarts_alone
        self.recover: Callable[[], Awaitable[None]] | None = None
        """Function that brings a restarted role up to date, before other calls reach it."""
        self.pause: Callable[[float], Awaitable[None]] = asyncio.sleep
        """Function that waits before a restart, for at least the given seconds."""
        self._log_file, self._start_new = log_file, start_process
        self._budget, self._note, self._record, self._started = budget, note, record, started
        self._family, self._remembers, self._names = family, remembers, names
        if family is not None:
            family.roles.append(self)
        self._last: Call | None = None
        self._errors: dict[str, str] = {}
        """Last error of each method; removed when a call of the method succeeds."""
        self._start_timeout_s = 0.0
        self.process = self._start_process(0)
        self._restarting: asyncio.Task[None] | None = None
        self._waiting, self._nobody_waits = 0, asyncio.Event()
        self._nobody_waits.set()

    def submit(
        self,
        method: str,
        *args: Any,
        num_returns: int = 1,
        lane: str = "main",
        once: bool = False,
    ) -> Any:
        """Start a call without waiting for it."""
        call = Call(self.name, method, args, num_returns, lane, once)
        if not self._must_wait():
            call.make(self.process)
        parts = [Part(call, number) for number in range(num_returns)]
        return parts[0] if num_returns == 1 else parts

    async def result(
        self,
        part: Part,
        what: str,
        timeout_s: float,
        turn: Callable[[], Awaitable[Any]] | None = None,
    ) -> Any:
        """Wait for a call's result; repeat the call after a restart of the role."""
        call = part.call
        assert call.role == self.name, f"{call.method} is a call of {call.role}, not {self.name}"
        while True:
            await self._wait_restarted()
            if self.lost:
                raise RoleLostError(self.name)
            process = self.process
            if call.once and call.incarnation != process.incarnation:
                return None
            call.make(process)
            try:
                answer = await self.answer(part, what, timeout_s)
            except RoleFailedError as failure:
                repeated = failure.what in (call.last_error, self._errors.get(call.method))
                call.last_error = failure.what
                if failure.kind == "raised":
                    self._errors[call.method] = failure.what
                await self._handle_failure(failure, process, repeated=repeated)
            else:
                if turn is not None and not await process.wait_turn(turn):
                    continue
                self._errors.pop(call.method, None)
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
        """Wait for a result without ever repeating the call."""
        self._waiting += 1
        self._nobody_waits.clear()
        # Not asyncio.wait_for: it loses a cancellation that comes with the result (Python 3.11).
        try:
            async with asyncio.timeout(timeout_s):
                return await (part.call.reference(part.number) if isinstance(part, Part) else part)
        except TimeoutError:
            problem = f"did not answer {what} within {timeout_s:g} s"
            dump_task_stacks(Path(self._log_file).parent, f"{self.name} {problem}")
            raise RoleFailedError(self.name, problem, self._log_file, "silent") from None
        except RayError as error:
            raise role_failure(error, self.name, what, self._log_file, self._names) from error
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._nobody_waits.set()

    async def ready(self, timeout_s: float | None = None) -> None:
        """Wait until the role is built; a process that ends before that is restarted."""
        self._start_timeout_s, process = timeout_s or self._start_timeout_s, self.process
        try:
            await self._wait_built()
        except RoleFailedError as failure:
            if failure.kind != "died":  # an error in the role's code would come again
                raise
            await self._handle_failure(failure, process)

    async def watch(
        self, interval_s: float, patience_s: float, beat: Callable[[str, dict[str, Any]], None]
    ) -> None:
        """Restart the role whenever its process dies or hangs; return once the role is given up."""
        while not self.lost:
            await self._wait_restarted()
            process = self.process
            try:
                async with asyncio.timeout(interval_s + patience_s):
                    use = await process.host.heartbeat.remote(interval_s)
            except TimeoutError:
                problem = f"sent no heartbeat for {patience_s:g} s"
                failure = RoleFailedError(self.name, problem, self._log_file, "silent")
                await self._handle_failure(failure, process)
            except RayError as error:
                failure = role_failure(error, self.name, "heartbeat", self._log_file, self._names)
                await self._handle_failure(failure, process)
            else:
                beat(self.name, use)

    async def process_failure(
        self, patience_s: float, beat: Callable[[str, dict[str, Any]], None] | None = None
    ) -> RoleFailedError | None:
        """Check that the role's process answers; return its failure, or None if it answers."""
        heartbeat = self.process.host.heartbeat.remote(0.0)
        try:
            use = await self.answer(heartbeat, "heartbeat", patience_s)
        except RoleFailedError as failure:
            return failure
        if beat:
            beat(self.name, use)

    async def replay_restart(self, what: str) -> None:
        """Restart the process as the replayed run did."""
        failure = RoleFailedError(self.name, what, self._log_file, "died")
        await self._handle_failure(failure, self.process)

    async def begin_again(self) -> None:
        """Replace the process by a new one, without restoring the old one's state.

        Nobody watches a role between two attempts: if the old process has died by itself, or the
        new one dies before the role is built, that is a restart like any other.
        """
        await self.wait_idle()
        process, dead = self.process, await self.process_failure(_ANSWER_S)
        if dead is not None and dead.kind == "died":
            self._last = None
            await self._handle_failure(dead, process)
        else:
            await self.end()
            self.start_again()
            await self.ready()

    async def end(self) -> None:
        """End the process, and forget the call that a restart would repeat."""
        await self.wait_idle()
        self._last = None
        await self._end_process()

    async def wait_idle(self) -> None:
        """Wait until a restart that is under way has ended, whether or not it succeeded."""
        if self._restarting is not None:
            await asyncio.wait([self._restarting])

    async def close(self, timeout_s: float) -> None:
        """Let the role stop its child processes."""
        if not self.lost:
            await self.answer(self.process.host.close.remote(), "close", timeout_s)

    async def _wait_built(self) -> None:
        process = self.process
        built = self.answer(process.starting, "start", self._start_timeout_s)
        identity = await self._budget.wait_with_room(built, self.name, self._log_file)
        process.pid, process.node_id = identity["pid"], identity["node_id"]
        self._started(self.name, identity)

    def _must_wait(self) -> bool:
        """Return whether a restart is under way in another task than the current one."""
        return self._restarting is not None and asyncio.current_task() is not self._restarting

    async def _wait_restarted(self) -> None:
        while self._must_wait():
            assert self._restarting is not None
            await asyncio.shield(self._restarting)

    async def _handle_failure(
        self, failure: RoleFailedError, process: RoleProcess, *, repeated: bool = False
    ) -> None:
        """Restart the role unless done already; raise a failure that this cannot mend."""
        # The call needed another role's result, or one that is lost.
        of_another = failure.role != self.name or failure.kind == "lost"
        if of_another or not self.restarts_alone or asyncio.current_task() is self._restarting:
            raise failure
        if self._restarting is None and process is self.process and not self.lost:
            self._restarting = asyncio.create_task(self._restart(failure, repeated))
            # Nobody may be left to wait for it if another role has ended the loops meanwhile.
            self._restarting.add_done_callback(lambda task: task.cancelled() or task.exception())
        await self._wait_restarted()

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
                    await self._end_process()
                    self._record("restart", role=self.name, what=final.what, given_up=True)
                    return
                self._note(f"{self.name} {failure.what}; restarting it ({self._budget.used()})")
                if failure.kind == "silent":
                    self.process.signal(DUMP_STACKS)
                    await asyncio.sleep(_STACK_DUMP_S)
                await self._end_process()
                # Recorded only now: the event log must first have every result received before.
                self._record("restart", role=self.name, what=failure.what, given_up=False)
                await self.pause(pause_s)
                self.start_again()
                try:
                    await self._wait_built()
                    if self._last is not None:
                        self._last.make(self.process)
                        await self.answer(self._last.reference(0), self._last.method, 60)
                    if self.recover is not None:
                        await self.recover()
                except RoleFailedError as again:
                    if again.role != self.name or again.kind == "lost":
                        raise
                    repeated, failure = again.what == failure.what, again
                else:
                    self._note(f"{self.name} is back after {time.monotonic() - began:.0f} s")
                    return
        finally:
            self._restarting = None

    async def _end_process(self) -> None:
        """Kill the process and wait until its pending calls have failed."""
        self.process.kill()
        try:
            async with asyncio.timeout(_PENDING_CALLS_S):
                await self._nobody_waits.wait()
        except TimeoutError:
            problem = f"was killed, but its calls are still pending after {_PENDING_CALLS_S:g} s"
            raise RoleFailedError(self.name, problem, self._log_file, "waited") from None

    def _start_process(self, incarnation: int) -> RoleProcess:
        process = self._start_new(incarnation)
        self._names[process.host._actor_id.hex()] = self.name
        return process

    def start_again(self) -> None:
        """Start a new process in place of one that has ended; `ready` waits for it."""
        self.process.ended.set()
        self.process = self._start_process(self.process.incarnation + 1)


def role_failure(
    error: RayError, role: str, method: str, log_file: str, names: Mapping[str, str]
) -> RoleFailedError:
    """Return the failure behind an error that Ray raised for a call."""
    cause: Any = error
    while isinstance(cause, RayTaskError):
        cause = cause.cause
    if isinstance(cause, RoleFailedError):
        return cause
    if isinstance(cause, RayActorError):
        name = names.get(cause.actor_id or "", role)
        log = str(Path(log_file).with_name(f"{name}.log"))
        return RoleFailedError(name, _cause_of_death(cause), log, "died")
    if isinstance(cause, ObjectLostError):
        what = f"cannot go on with {method}: data that it needs was lost with another node"
        return RoleFailedError(role, what, log_file, "lost")
    if isinstance(cause, OutOfMemoryError):
        return RoleFailedError(role, _out_of_memory(cause), log_file, "died")
    return RoleFailedError(role, f"failed in {method}: {error}", log_file, "raised")


def _out_of_memory(error: OutOfMemoryError) -> str:
    """Say that memory was full, with the figures from the start of Ray's long message."""
    found = re.search(r"was (\S+) used / (\S+) limit", str(error))
    figures = f", {found[1]} of {found[2]} in use" if found else ""
    return f"died: killed because the machine's memory was full{figures}"


def _cause_of_death(error: RayActorError) -> str:
    """Say how a process ended: the kind of exit, and the first sentence of Ray's explanation."""
    text = " ".join(str(error).split())
    if "its node has died" in text:
        found = re.search(r" ip: (\S+)", text)
        return f"died: its node{f' {found[1]}' if found else ''} died, or cannot be reached"
    if isinstance(error, ActorUnavailableError):
        return "died: its process or its node cannot be reached"
    found = re.search(r"exit type: (\w+) Worker exit detail: (.+?\.)( |$)", text)
    if found is None:
        return f"died: {text}"
    if found[1] == "SYSTEM_ERROR":  # the explanation only says that the connection broke
        return "died: killed, out of memory, or crashed"
    return f"died: {found[1]}: {found[2]}"
