"""Stands in for the receiver in a vLLM trainer engine, whose calls the driver relays."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any

Request = tuple[str, Any]
"""A call of the trainer engine: its kind (init, start, update or finish) and its argument."""
_SLACK_S = 5.0
"""Seconds added to the relay's wait, so that the error of the sender or receiver is first."""


class RelayedClient:
    """Has the methods of vLLM's `VLLMWeightSyncClient`; each waits until the call is answered.

    A trainer knows no generator. So the driver takes one call after the other with `next_request`,
    makes it in the generator, and comes back with the answer.
    """

    def __init__(self, receiver: str, timeout_s: float) -> None:
        self._receiver, self._timeout_s = receiver, timeout_s
        self._requests: SimpleQueue[Request | None] = SimpleQueue()
        self._answer: Future[None] = Future()
        self._lock = threading.Lock()
        self.abandoned = ""
        """Why nobody relays calls any more; empty as long as somebody does."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Let the receiver join the transfer group."""
        self._ask("init", init_info)

    def start_weight_update(self) -> None:
        """Let the receiver prepare for new weights."""
        self._ask("start")

    def update_weights(self, update_info: Any) -> None:
        """Let the receiver take tensors, while they are sent."""
        self._ask("update", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Let the receiver put the new weights into use; the driver tells it their version."""
        self._ask("finish")

    def end(self) -> None:
        """Report that the trainer engine makes no more calls."""
        self._requests.put(None)

    def next_request(self, *, answered: bool) -> Request | None:
        """Wait for the trainer engine's next call; None if there is no more, or nobody answers."""
        if answered:
            self._answer.set_result(None)
        if self.abandoned:
            return None
        limit_s = self._timeout_s + _SLACK_S
        try:
            return self._requests.get(timeout=limit_s)
        except Empty:
            problem = f"weights for {self._receiver} waited {limit_s:g} s to be sent"
            raise TimeoutError(problem) from None

    def abandon(self, reason: str) -> None:
        """Fail the call that waits, and every later one."""
        with self._lock:
            self.abandoned = reason
            if not self._answer.done():
                self._answer.set_exception(ConnectionError(reason))
        self.end()

    def _ask(self, kind: str, info: Any = None) -> None:
        with self._lock:
            if self.abandoned:
                raise ConnectionError(self.abandoned)
            self._answer = answer = Future()
        self._requests.put((kind, info))
        try:
            answer.result(self._timeout_s)
        except TimeoutError:
            problem = f"waited {self._timeout_s:g} s for {self._receiver} to answer {kind!r}"
            raise TimeoutError(f"the sender of weights {problem}") from None
