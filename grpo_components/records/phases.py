"""Measures the phases of a run's start and end, from the command to the prompt."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from grpo_components.files import append_line

TRAINING = "training"


class Phases:
    """Writes what each phase took to a file.

    The first phase began with the process: imports, the check of the config, and the data.
    """

    def __init__(self, file: Path, attempt: int, show: Callable[[str], None] | None = None) -> None:
        self._file, self._attempt, self._show = file, attempt, show
        self._name, self._began = "imports, config and data", psutil.Process().create_time()

    def begin(self, name: str) -> None:
        """End the present phase and begin another; do nothing if that is the present one."""
        if name != self._name:
            self.end()
            self._name = name

    def end(self) -> None:
        """End the present phase."""
        now = time.time()
        seconds, self._began = round(now - self._began, 3), now
        if self._show:
            self._show(f"{self._name} took {seconds:.1f} s")
        record = {"attempt": self._attempt, "phase": self._name, "seconds": seconds}
        with contextlib.suppress(OSError):  # a full disk must not keep the run from ending
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a", encoding="utf-8") as file:
                append_line(file, json.dumps(record))
