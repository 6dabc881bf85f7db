"""Lets a vLLM engine sleep without GPU memory, and wakes it around a load of new weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

_LEVELS = {"cuda": 2, "cpu": 0}
"""vLLM's sleep levels: 2 frees weights and KV cache, 0 only pauses the scheduler.

Level 1 frees both and keeps a copy of the weights in CPU memory, for an engine that only gets
adapters.

vLLM cannot free memory on a CPU, where an engine that sleeps keeps all of it.
"""


def sleep_arguments(device: str) -> dict[str, Any]:
    """Return vLLM's arguments for an engine that will sleep."""
    return {"enable_sleep_mode": True} if _LEVELS[device] else {}


class EngineSleep:
    """Whether an engine sleeps, and how it is woken.

    All calls come from the engine's thread. vLLM measures what the whole GPU has free before and
    after it falls asleep, so no other process may take memory meanwhile.
    """

    def __init__(self, engine: Any, device: str, *, keeps_weights: bool = False) -> None:
        self._engine = engine
        self._level = min(_LEVELS[device], 1) if keeps_weights else _LEVELS[device]
        self.asleep = False

    def begin(self) -> None:
        """Fall asleep; no request may be running."""
        self._engine.sleep(level=self._level)
        self.asleep = True

    @contextlib.contextmanager
    def woken(self) -> Iterator[None]:
        """Context manager: wake an engine that sleeps, with the weights that are loaded meanwhile.

        The KV cache gets its memory only after the load, which needs some for itself. vLLM restores
        buffers that are no weights, such as rotary tables, with the weights' memory: before the
        load, which leaves them as they are.
        """
        if self.asleep and self._level:
            self._engine.wake_up(["weights"])
        yield
        if self.asleep:
            self._engine.wake_up(["kv_cache"] if self._level else ["scheduling"])
            self.asleep = False
