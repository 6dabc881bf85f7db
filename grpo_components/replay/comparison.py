"""Finds where a what-if first differs from the run that it left."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from grpo_components.replay.event_order import Event
from grpo_components.replay.recorded_run import Original, read_json_lines

_MEASURED = ("loss/total", "grad_norm", "lr")
"""Metrics of a step that its batch, the weights before it and the config decide."""


class Comparison:
    """Compares steps and weights of a what-if's live part with the original's."""

    def __init__(
        self, run: Path, original: Original, begins_after: int, note: Callable[[str], None]
    ) -> None:
        self._run, self._original, self._begins_after = run, original, begins_after
        self._note = note
        lines = read_json_lines(run / "logs" / "metrics.jsonl")
        self._metrics = {line["step"]: line for line in lines if _MEASURED[0] in line}
        self._differs: dict[int, list[str]] = {}
        self._equal = 0

    def check_load(self, event: Event) -> None:
        """Compare the weights of a `load` event with the original's; ignore other events."""
        if event["event"] == "load":
            version = event["version"]
            expected = self._original.checksums.get(version, event["checksum"])
            if event["checksum"] != expected and version > self._begins_after:
                self._add(version, f"weights of version {version}")

    def check_batch(self, step: int, batch_hash: str) -> None:
        """Compare the batch of a step with the original's."""
        expected = self._original.batch_hashes.get(step)
        self._equal += batch_hash == expected
        if expected not in (None, batch_hash):
            self._add(step, "batch")

    def check_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Compare what a step measured in training with what the original's step did."""
        recorded = self._metrics.get(step, {})
        for name in _MEASURED:
            if recorded.get(name) is not None and metrics.get(name) != recorded[name]:
                found = metrics.get(name, math.nan)
                self._add(step, f"{name} {found:.9g} (there {recorded[name]:.9g})")

    def summary(self) -> str:
        """Return where the what-if first differed, and how many of its batches were the same."""
        same = f"same batches from there on: {self._equal}"
        return f"{self._run} up to step {self._begins_after}, then live; {self._first()}; {same}"

    def _first(self) -> str:
        if not self._differs:
            return "no difference found"
        step = min(self._differs)
        return f"first difference in step {step}: {', '.join(self._differs[step])}"

    def _add(self, step: int, what: str) -> None:
        is_first = not self._differs
        found = self._differs.setdefault(step, [])
        if what not in found:
            found.append(what)
        if is_first:
            self._note(f"what-if: {self._first()}")
