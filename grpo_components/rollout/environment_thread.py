"""The thread that an environment lives in: when it does not answer in time, it is left behind."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class EnvironmentThread:
    """Makes the calls into one environment, one at a time, with a deadline.

    A thread that hangs cannot be stopped: it is a daemon, and whoever called it goes on without.

    Args:
        timeout_s: longest that the calls of a rollout take together.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = self._left_s = timeout_s
        self._calls: queue.SimpleQueue[tuple[Callable[..., Any], Any, Future[Any]] | None]
        self._calls = queue.SimpleQueue()
        threading.Thread(target=self._run, name="environment", daemon=True).start()

    def begin(self) -> None:
        """Begin a rollout: its calls have all of the time."""
        self._left_s = self._timeout_s

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """The function's result, or what it raised.

        Args:
            function: builds the environment, or is a method of it.
            args: for it.

        Raises:
            TimeoutError: if it has not ended in time.
        """
        future: Future[Any] = Future()
        self._calls.put((function, args, future))
        started = time.monotonic()
        try:
            return future.result(self._left_s)
        except TimeoutError:
            if future.done():
                raise
            name = getattr(function, "__name__", "call")
            raise TimeoutError(
                f"the environment did not end its {name} within {self._timeout_s:g} s a rollout"
            ) from None
        finally:
            self._left_s = max(0.0, self._left_s - (time.monotonic() - started))

    def leave(self, close: Callable[[], Any]) -> Future[Any]:
        """Let the thread end, after the call that it is in.

        Args:
            close: its last call; what it raises is of no interest any more.

        Returns:
            Done once it was called.
        """
        closing: Future[Any] = Future()
        self._calls.put((close, (), closing))
        self._calls.put(None)
        return closing

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            function, args, future = call
            try:
                future.set_result(function(*args))
            except Exception as error:  # whatever it is, its caller hears of it
                future.set_exception(error)
            except BaseException as error:  # such as sys.exit, which ends nobody here
                future.set_exception(RuntimeError(repr(error)))
            del call, function, args, future  # or the environment would be kept while idle
