"""torchtune's profiler in a trainer rank: from the first training step on, one step at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class StepProfiler:
    """Drives a profiler as torchtune's recipes do.

    Args:
        build: makes a pair of the profiler (start, step, stop) and its settings, as
            `torchtune.training.setup_torch_profiler` does; None profiles nothing.
    """

    def __init__(self, build: Callable[[], tuple[Any, Any]] | None) -> None:
        self._profiler = build()[0] if build else None
        if self._profiler is not None:
            self._profiler.start()

    def step(self) -> None:
        """End one training step; the last of a cycle writes the traces, on all ranks together."""
        if self._profiler is not None:
            self._profiler.step()

    def close(self) -> None:
        """Stop; a cycle that is going on writes the traces that it has."""
        if self._profiler is not None:
            self._profiler.stop()
