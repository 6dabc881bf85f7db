"""Runs torchtune's profiler in a trainer rank, one training step at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class StepProfiler:
    """Drives a profiler as torchtune's recipes do."""

    def __init__(self, build: Callable[[], tuple[Any, Any]] | None) -> None:
        self._profiler = build()[0] if build else None
        if self._profiler is not None:
            self._profiler.start()

    def step(self) -> None:
        """End one training step; the last one of a profiler cycle writes the traces; collective."""
        if self._profiler is not None:
            self._profiler.step()

    def close(self) -> None:
        """Stop the profiler; it writes the traces of an unfinished cycle."""
        if self._profiler is not None:
            self._profiler.stop()
