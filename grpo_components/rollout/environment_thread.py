"""Runs the code of environments in threads, and abandons a thread after a missed deadline."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from traceback import StackSummary, extract_stack
from typing import Any

from grpo_components.objective.component_errors import place_in, users_part

_QUICK_CALLS, _QUICK_S = 8, 0.01
"""Maximum number of quick calls at once, and seconds after which a call counts as slow."""


class HungCallError(TimeoutError):
    """The environment calls of a rollout took too long."""

    def __init__(self, problem: str, stack: StackSummary) -> None:
        super().__init__(problem)
        self.stack = stack


def hang_text(error: HungCallError) -> str:
    """Return the error message of a hanging environment, with the place in the user's code."""
    stack = users_part(error.stack)
    lines = ["\nWhere it hangs (innermost call last):\n", *stack.format()] if stack else []
    return f"environment: TimeoutError{place_in(stack)}: {error}{''.join(lines)}".strip()


class TimeLimit:
    """Limits the total seconds of a rollout's environment calls and rewards."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = self._left_s = timeout_s

    @contextlib.contextmanager
    def running(self) -> Iterator[float]:
        """Context manager: subtract the time spent inside; yields the seconds that are left."""
        started = time.monotonic()
        try:
            yield self._left_s
        finally:
            self._left_s = max(0.0, self._left_s - (time.monotonic() - started))


class EnvironmentThread:
    """Runs calls into environments in a thread of its own, one at a time.

    A hanging thread cannot be stopped. It is a daemon thread, so the process can exit without it.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[..., Any], Any, Future[Any]] | None]
        self._calls = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="environment", daemon=True)
        self._thread.start()

    def start(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Queue a call of a function for the thread; return the future of its result."""
        future: Future[Any] = Future()
        self._calls.put((function, args, future))
        return future

    async def run(self, limit: TimeLimit, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function in the thread; return its result, or raise its exception."""
        return await self.outcome(limit, function, self.start(function, *args))

    async def outcome(
        self, limit: TimeLimit, function: Callable[..., Any], future: Future[Any]
    ) -> Any:
        """Wait for the result of a started call; raise a `HungCallError` at the time limit."""
        try:
            with limit.running() as left_s:
                return await asyncio.wait_for(asyncio.wrap_future(future), left_s)
        except TimeoutError:
            if future.done() and not future.cancelled():
                raise
            name = getattr(function, "__name__", "call")
            within = f"{limit.timeout_s:g} s, the limit for all calls of a rollout"
            problem = f"the environment did not end its {name} within {within}"
            frame = sys._current_frames().get(self._thread.ident or 0)
            stack = extract_stack(frame) if frame else StackSummary()
            raise HungCallError(problem, stack) from None

    def leave(self, close: Callable[[], Any] = lambda: None) -> Future[Any]:
        """Run `close` after the queued calls, then end the thread; return the future of `close`."""
        closing = self.start(close)
        self._calls.put(None)
        return closing

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            function, args, future = call
            if not future.set_running_or_notify_cancel():  # its time limit has passed
                continue
            try:
                future.set_result(function(*args))
            except BaseException as error:  # sys.exit, for example, must not end this thread
                # asyncio cannot pass on a StopIteration.
                if isinstance(error, Exception) and not isinstance(error, StopIteration):
                    future.set_exception(error)
                else:
                    named = RuntimeError(repr(error)).with_traceback(error.__traceback__)
                    future.set_exception(named)
                    del named
            del call, function, args, future  # else an idle thread would keep the environment alive


class EnvironmentThreads:
    """Runs the calls of many rollouts: quick calls share a few threads, a slow one has its own."""

    def __init__(self) -> None:
        self._idle: deque[EnvironmentThread] = deque()
        self._quick = asyncio.Semaphore(_QUICK_CALLS)

    async def call(self, limit: TimeLimit, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function in a thread; return its result, or raise its exception."""
        await self._quick.acquire()
        thread = self._idle.pop() if self._idle else EnvironmentThread()
        future = thread.start(function, *args)
        try:
            answer = asyncio.wrap_future(future)
            with limit.running() as left_s:
                try:
                    await asyncio.wait([answer], timeout=min(_QUICK_S, left_s))
                finally:
                    self._quick.release()
            return await thread.outcome(limit, function, future)
        finally:
            if future.done():
                self._idle.append(thread)
            else:
                thread.leave()

    def close(self) -> None:
        """Let the idle threads end."""
        while self._idle:
            self._idle.pop().leave()
