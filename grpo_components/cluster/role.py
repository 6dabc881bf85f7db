"""The driver's side of one role: calls it, watches its process and restarts it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from ray.exceptions import RayError

from grpo_components.cluster.role_host import DUMP_STACKS
from grpo_components.cluster.role_process import RoleProcess, role_failure
from grpo_components.cluster.supervision import dump_task_stacks, quiet_task
from grpo_components.errors import RoleFailedError, RoleLostError

_STACK_DUMP_S = 0.5
"""Grace period for a hung process to dump its stacks, in seconds."""
_ANSWER_S = 5.0
"""Longest wait for a process to show that it lives, in seconds."""
_PENDING_CALLS_S = 60.0
"""Longest wait for the pending calls of a killed process to fail, in seconds."""
_ROOM_CHECK_S = 5.0
"""Seconds between two checks that the nodes have room for a process that starts."""


class Role:
    """Calls one role of a run, such as a generator, and replaces its process if that fails.

    If the process dies, hangs or raises, it is restarted within the run's budget and the pending
    calls are repeated: whoever waits for a result only waits longer.
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
        recover: Callable[[str], Awaitable[None]],
        why_no_room: Callable[[], str],
        names: dict[str, str],
        can_spare: Callable[[], bool],
        pause: Callable[[float], Awaitable[None]],
        restarts_alone: bool,
    ) -> None:
        self.name, self.lost, self.restarts_alone = name, False, restarts_alone
        self._log_file, self._start_new = log_file, start_process
        self._budget, self._note, self._record, self._started = budget, note, record, started
        self._recover, self._why_no_room, self._names = recover, why_no_room, names
        self._can_spare, self._pause = can_spare, pause
        self._errors: dict[str, str] = {}
        """Last error of each method; removed when a call of the method succeeds."""
        self._start_timeout_s = 0.0
        self.process = self._start_process(0)
        self._restarting: asyncio.Task[None] | None = None
        self._waiting, self._nobody_waits = 0, asyncio.Event()
        self._nobody_waits.set()

    def submit(self, method: str, *args: Any, num_returns: int = 1, lane: str = "main") -> Any:
        """Send a call to the process; return a Ray reference, or a list with one per result."""
        return self.process.send(method, lane, args, num_returns)

    async def call(
        self,
        method: str,
        *args: Any,
        timeout_s: float,
        num_returns: int = 1,
        lane: str = "main",
        turn: Callable[[], Awaitable[Any]] | None = None,
    ) -> Any:
        """Call a method and wait for its result; repeat the call after a restart of the role.

        `lane` names the thread that runs the method, unless the method is async. With several
        results, returns (references to all, value of the second). In a replay of a recorded run,
        `turn` waits until the recorded order has come to this result.
        """
        last_error = ""
        while True:
            await self.restarted()
            process = self.process
            sent = self.submit(method, *args, num_returns=num_returns, lane=lane)
            try:
                answer = await self.answer(sent if num_returns == 1 else sent[1], method, timeout_s)
            except RoleFailedError as failure:
                await self._mend(method, failure, process, last_error)
                last_error = failure.what
            else:
                if turn is None or await process.wait_turn(turn):
                    self._errors.pop(method, None)
                    return answer if num_returns == 1 else (sent, answer)

    async def call_once(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Call a method and wait for its result; None if the role is restarted meanwhile."""
        if self.is_restarting:
            return await self.restarted()
        process = self.process
        return await self.outcome(self.submit(method, *args), process, method, timeout_s)

    async def outcome(
        self, reference: Any, process: RoleProcess, method: str, timeout_s: float
    ) -> Any:
        """Wait for the result of a call to a process; None if the process is replaced meanwhile."""
        try:
            answer = await self.answer(reference, method, timeout_s)
        except RoleFailedError as failure:
            await self._mend(method, failure, process)
            return await self.restarted()
        self._errors.pop(method, None)
        return answer

    async def answer(self, reference: Awaitable[Any], what: str, timeout_s: float) -> Any:
        """Wait for a result; raise `RoleFailedError` for any failure, without a restart."""
        self._waiting += 1
        self._nobody_waits.clear()
        # Not asyncio.wait_for: it loses a cancellation that comes with the result (Python 3.11).
        try:
            async with asyncio.timeout(timeout_s):
                return await reference
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

    @property
    def is_restarting(self) -> bool:
        """Whether a task other than the current one is restarting the role."""
        return self._restarting is not None and asyncio.current_task() is not self._restarting

    async def restarted(self) -> None:
        """Wait until no restart is under way; raise `RoleLostError` if the role is given up."""
        await self._wait_restarted()
        if self.lost:
            raise RoleLostError(self.name)

    async def ready(self, timeout_s: float | None = None) -> None:
        """Wait until the role is built; restart a process that ends before then."""
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
        """Restart the role whenever its process dies or hangs, until the role is given up."""
        while not self.lost:
            await self._wait_restarted()
            process = self.process
            if failure := await self.process_failure(patience_s, beat, interval_s):
                await self._handle_failure(failure, process)

    async def process_failure(
        self,
        patience_s: float,
        beat: Callable[[str, dict[str, Any]], None] | None = None,
        after_s: float = 0.0,
    ) -> RoleFailedError | None:
        """Wait for a heartbeat, due in `after_s` seconds; return the process's failure, or None."""
        heartbeat = self.process.host.heartbeat.remote(after_s)
        try:
            use = await self.answer(heartbeat, "a heartbeat", after_s + patience_s)
        except RoleFailedError as failure:
            return failure
        if beat:
            beat(self.name, use)

    async def replay_restart(self, what: str) -> None:
        """In a replay, restart the process where the recorded run did; `what` is the reason."""
        failure = RoleFailedError(self.name, what, self._log_file, "died")
        await self._handle_failure(failure, self.process)

    async def begin_again(self) -> None:
        """Replace the process by a new one, while the run goes back to a checkpoint.

        `watch` does not run meanwhile. So if the old process has died by itself, or the new one
        dies before the role is built, this method counts a restart in the restart budget.
        """
        await self.wait_idle()
        process, dead = self.process, await self.process_failure(_ANSWER_S)
        if dead is not None and dead.kind == "died":
            await self._handle_failure(dead, process)
        else:
            await self.end()
            self.start_again()
            await self.ready()

    async def end(self) -> None:
        """Kill the process and wait until its pending calls have failed."""
        await self.wait_idle()
        await self._end_process()

    async def wait_idle(self) -> None:
        """Wait until a restart that is under way has ended, whether or not it succeeded."""
        if self._restarting is not None:
            await asyncio.wait([self._restarting])

    async def close(self, timeout_s: float) -> None:
        """Let the role stop its child processes."""
        if not self.lost:
            await self.answer(self.process.host.close.remote(), "close", timeout_s)

    def start_again(self) -> None:
        """Start a new process in place of one that has ended; `ready` waits for it."""
        self.process.ended.set()
        self.process = self._start_process(self.process.incarnation + 1)

    def _start_process(self, incarnation: int) -> RoleProcess:
        process = self._start_new(incarnation)
        self._names[process.host._actor_id.hex()] = self.name
        return process

    async def _wait_built(self) -> None:
        process = self.process
        built = self.answer(process.starting, "start", self._start_timeout_s)
        starting = asyncio.ensure_future(built)
        try:
            # Ray waits without end for a node that it finds dead only after the start has begun.
            while not (await asyncio.wait([starting], timeout=_ROOM_CHECK_S))[0]:
                if problem := self._why_no_room():
                    what = f"cannot start; {problem}"
                    raise RoleFailedError(self.name, what, self._log_file, "waited")
            identity = starting.result()
        finally:
            starting.cancel()
        process.pid, process.node_id = identity["pid"], identity["node_id"]
        self._started(self.name, identity)

    async def _mend(
        self, method: str, failure: RoleFailedError, process: RoleProcess, last_error: str = ""
    ) -> None:
        """Restart the role after a failed call, or raise the failure."""
        repeated = failure.what in (last_error, self._errors.get(method))
        if failure.kind == "raised":
            self._errors[method] = failure.what
        await self._handle_failure(failure, process, repeated=repeated)

    async def _handle_failure(
        self, failure: RoleFailedError, process: RoleProcess, *, repeated: bool = False
    ) -> None:
        """Restart the role if no task has yet; raise a failure that a restart cannot repair."""
        # Another role failed, or a result that the call needed is lost.
        of_another = failure.role != self.name or failure.kind == "lost"
        if of_another or not self.restarts_alone or asyncio.current_task() is self._restarting:
            raise failure
        if self._restarting is None and process is self.process and not self.lost:
            # Maybe nobody waits for it, if another role has ended the loops meanwhile.
            self._restarting = quiet_task(self._restart(failure, repeated))
        await self._wait_restarted()

    async def _wait_restarted(self) -> None:
        while self.is_restarting:
            assert self._restarting is not None
            await asyncio.shield(self._restarting)

    async def _restart(self, failure: RoleFailedError, repeated: bool) -> None:
        began = time.monotonic()
        try:
            while (pause_s := await self._end_failed(failure, repeated)) is not None:
                await self._pause(pause_s)
                self.start_again()
                try:
                    await self._wait_built()
                    await self._recover(self.name)
                except RoleFailedError as again:
                    if again.role != self.name or again.kind == "lost":
                        raise
                    repeated, failure = again.what == failure.what, again
                else:
                    self._note(f"{self.name} is back after {time.monotonic() - began:.0f} s")
                    return
        finally:
            self._restarting = None

    async def _end_failed(self, failure: RoleFailedError, repeated: bool) -> float | None:
        """End a failed process; return the pause before a restart, or None to give the role up."""
        try:
            no_room = self._why_no_room()
            pause_s = self._budget.spend(failure, repeated=repeated, no_room=no_room)
        except RoleFailedError as final:
            if not self._can_spare():
                raise
            self.lost, failure, pause_s = True, final, None
            self._note(f"{self.name} is given up: it {failure.what}")
        else:
            self._note(f"{self.name} {failure.what}; restarting it ({self._budget.used()})")
        if failure.kind == "silent":
            self.process.signal(DUMP_STACKS)
            await asyncio.sleep(_STACK_DUMP_S)
        await self._end_process()
        # Recorded only now: the event log must first have every result received before.
        self._record("restart", role=self.name, what=failure.what, given_up=self.lost)
        return pause_s

    async def _end_process(self) -> None:
        self.process.kill()
        try:
            async with asyncio.timeout(_PENDING_CALLS_S):
                await self._nobody_waits.wait()
        except TimeoutError:
            problem = f"was killed, but its calls are still pending after {_PENDING_CALLS_S:g} s"
            raise RoleFailedError(self.name, problem, self._log_file, "waited") from None


_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0


class RestartBudget:
    """Allows a number of restarts, of all roles together, within a sliding window of time."""

    def __init__(
        self, max_restarts: int, window_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_restarts, self._window_s, self._clock = max_restarts, window_s, clock
        self._restarts: deque[tuple[float, str]] = deque()

    def spend(self, failure: RoleFailedError, *, repeated: bool, no_room: str = "") -> float:
        """Count a restart and return the pause before it (s); raise the failure if not allowed."""
        now, role = self._clock(), failure.role
        while self._restarts and now - self._restarts[0][0] > self._window_s:
            self._restarts.popleft()
        of_role = sum(restarted == role for _, restarted in self._restarts)
        if failure.kind in ("waited", "refused"):
            raise failure
        if no_room:
            raise failure.with_history(no_room)
        if failure.kind == "raised" and repeated:
            raise failure.with_history("failed the same way again after a restart")
        if len(self._restarts) >= self._max_restarts:
            if not self._restarts:
                raise failure
            raise failure.with_history(
                f"max_restarts is used up by {len(self._restarts)} restarts in the last "
                f"{self._window_s:g} s ({of_role} of them of {role})"
            )
        self._restarts.append((now, role))
        return min(_FIRST_PAUSE_S * 2**of_role, _LONGEST_PAUSE_S)

    def used(self) -> str:
        """Return how much of the restart budget is used, as text for a message."""
        return f"restart {len(self._restarts)} of at most {self._max_restarts}"
