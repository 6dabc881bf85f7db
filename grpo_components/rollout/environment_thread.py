"""Runs an environment in its own thread, and abandons the thread after a missed deadline."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from traceback import StackSummary, walk_stack
from typing import Any


class HungCallError(TimeoutError):
    """The calls of a rollout took too long."""

    def __init__(self, problem: str, stack: StackSummary) -> None:
        super().__init__(problem)
        self.stack = stack


class EnvironmentThread:
    """Runs the calls into one environment, one at a time and with a deadline.

    A hanging thread cannot be stopped. It is a daemon thread, so the process can exit without it.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = self._remaining_s = timeout_s
        self._calls: queue.SimpleQueue[tuple[Callable[..., Any], Any, Future[Any]] | None]
        self._calls = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="environment", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Begin a rollout: reset the time for its calls."""
        self._remaining_s = self._timeout_s

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function in the thread; return its result, or raise its exception."""
        future: Future[Any] = Future()
        self._calls.put((function, args, future))
        started = time.monotonic()
        try:
            return future.result(self._remaining_s)
        except TimeoutError:
            if future.done():
                raise
            name = getattr(function, "__name__", "call")
            limit = f"{self._timeout_s:g} s, the limit for all calls of a rollout"
            problem = f"the environment did not end its {name} within {limit}"
            raise HungCallError(problem, self._stack()) from None
        finally:
            self._remaining_s = max(0.0, self._remaining_s - (time.monotonic() - started))

    def _stack(self) -> StackSummary:
        """Return what the thread is doing, outermost call first."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        found = [] if frame is None else StackSummary.extract(walk_stack(frame))
        return StackSummary.from_list(found[::-1])

    def leave(self, close: Callable[[], Any]) -> Future[Any]:
        """Let the thread end after its current call."""
        closing: Future[Any] = Future()
        self._calls.put((close, (), closing))
        self._calls.put(None)
        return closing

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            function, args, future = call
            try:
                future.set_result(function(*args))
            except Exception as error:  # passed on to the caller
                future.set_exception(error)
            except BaseException as error:  # sys.exit, for example, must not end this thread
                named = RuntimeError(repr(error)).with_traceback(error.__traceback__)
                future.set_exception(named)
                del named
            del call, function, args, future  # else an idle thread would keep the environment alive
