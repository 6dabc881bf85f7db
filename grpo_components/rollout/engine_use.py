"""Measures how an engine spends its time, and how many sequences it runs at once."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Literal

from grpo_components.time_use import IDLE, TimeUse

NO_GROUP = f"{IDLE}: no group"
NO_REWARD = f"{IDLE}: rewards, environments"


class EngineUse:
    """Adds up an engine's seconds by activity, and its idle seconds by cause.

    The engine is idle while it runs no sequence: because no group is requested, or because every
    requested group waits for a reward or an environment.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._lock = threading.Lock()
        self._time, self._engine_does = TimeUse(NO_GROUP), IDLE
        self._rollouts = self._sequences = 0
        self._sequence_s = 0.0
        self._steps: defaultdict[str, list[float]] = defaultdict(lambda: [0.0] * 6)

    def begin(self, activity: Literal["sampling", "loading weights", "idle"], running: int) -> None:
        """Note the new activity of the engine's thread, and how many sequences are running."""
        with self._lock:
            self._engine_does = activity
            self._advance()
            self._sequences = min(running, self._max_num_seqs)

    @contextlib.contextmanager
    def rollout(self) -> Iterator[None]:
        """Context manager for a rollout, in which idle time has cause `NO_REWARD`. Thread-safe."""
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    @contextlib.contextmanager
    def step(self, prompts: int, prompt_tokens: int) -> Iterator[None]:
        """Context manager: measure one engine step. Only the engine's thread may call this."""
        sequences = self._sequences
        began, cpu_began = time.perf_counter(), time.thread_time()
        yield
        seconds, cpu_s = time.perf_counter() - began, time.thread_time() - cpu_began
        rounded_up = 1 << max(0, sequences - 1).bit_length()
        group = f"{rounded_up}" + ("+" if prompts else "")
        with self._lock:
            one = (1, sequences, prompts, prompt_tokens, seconds, cpu_s)
            self._steps[group] = [a + b for a, b in zip(self._steps[group], one, strict=True)]

    def report(self) -> dict[str, Any]:
        """Return how the engine has spent its time since its start.

        `seconds` and the process's `cpu_seconds` are by activity or cause of idle time.
        `sequence_share` is the mean share of `max_num_seqs` in use. `engine_steps` groups steps by
        the number of sequences (rounded up to a power of two, with + if they read prompts), with
        sums of: steps, sequences, prompts, prompt tokens, seconds, CPU seconds.
        """
        with self._lock:
            self._advance()
            use, steps = self._time.totals(), self._steps.items()
            most = self._max_num_seqs * sum(use["seconds"].values())
            return {
                **use,
                "sequence_share": self._sequence_s / most,
                "engine_steps": {group: [round(x, 4) for x in sums] for group, sums in steps},
            }

    def _count(self, change: int) -> None:
        with self._lock:
            self._rollouts += change
            self._advance()

    def _advance(self) -> None:
        """Add the time since the last call to the activity that was going on; begin the new one."""
        cause = NO_REWARD if self._rollouts else NO_GROUP
        passed = self._time.begin(cause if self._engine_does == IDLE else self._engine_does)
        self._sequence_s += passed * self._sequences
