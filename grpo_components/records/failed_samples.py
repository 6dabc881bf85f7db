"""Records samples whose reward or environment failed, and ends the run if there are too many."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_components.errors import FailedSamplesError
from grpo_components.exchange.ledger import LedgerEntry
from grpo_components.settings import Settings
from grpo_components.trajectory import GroupSummary

MAX_ERROR_CHARS = 300
"""Length to which a message cuts an error's first line; the file has the whole error."""


class FailedSamples:
    """Counts and records the failed samples of training and evaluation; ends a run with too many.

    The run ends if `max_failed_samples`, a share, of the samples since the last training step
    failed, and of the `step_samples` that a step trains. Every failed sample is written to
    `failed_samples.jsonl` with its prompt and traceback; the first after each step is also shown to
    the user.
    """

    def __init__(
        self,
        max_failed_samples: float,
        step_samples: int,
        logs: Path,
        attempt: int,
        note: Callable[[str], None],
    ) -> None:
        self._max_failed_samples, self._step_samples = max_failed_samples, step_samples
        self._path = logs / "failed_samples.jsonl"
        self.attempt, self._note = attempt, note
        self._count = self._ended = 0

    def count_group(self, entry: LedgerEntry, group: GroupSummary) -> bool:
        """Count the failed samples of one group."""
        what = {"group_id": entry.group_id, "epoch": entry.epoch}
        self._ended += len(group.rewards)
        self._record(entry.prompt, group.errors, f"group {entry.group_id}", what)
        return len(group.errors) == len(group.rewards)

    def count_evaluation(
        self, step: int, results: Sequence[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Count the failed samples of an evaluation."""
        self._ended += len(results)
        for result in results:
            errors = [] if result["error"] is None else [result["error"]]
            self._record(result, errors, f"the evaluation at step {step}", {"evaluation": step})
        scored = [result for result in results if result["error"] is None]
        if not scored:
            error = f"{first_line(results[0]['error']):.{MAX_ERROR_CHARS}}"
            raise FailedSamplesError(
                f"every sample of the evaluation at step {step} failed; the first error: {error}; "
                f"all errors: {self._path}"
            )
        return scored

    def take_count(self) -> int:
        """Return how many samples failed since the last call; call it once per training step."""
        count, self._count, self._ended = self._count, 0, 0
        return count

    def _record(
        self, prompt: Mapping[str, Any], errors: Sequence[str], where: str, what: dict[str, Any]
    ) -> None:
        if not errors:
            return
        record = {
            "attempt": self.attempt,
            **what,
            "prompt_index": prompt["prompt_index"],
            "prompt": prompt["prompt_text"],
            "errors": dict(Counter(first_line(error) for error in errors)),  # -> samples
        }
        tracebacks = {first_line(error): error.partition("\n")[2] for error in reversed(errors)}
        if any(tracebacks.values()):
            record["tracebacks"] = {line: text for line, text in tracebacks.items() if text}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        shown = f"{first_line(errors[-1]):.{MAX_ERROR_CHARS}}"
        if self._count == 0:
            self._note(f"{len(errors)} failed in {where}: {shown} (all errors: {self._path})")
        self._count += len(errors)
        if self._count >= self._max_failed_samples * max(self._ended, self._step_samples):
            raise FailedSamplesError(
                f"max_failed_samples: {self._max_failed_samples:g} given, but {self._count} of "
                f"{self._ended} samples failed since the last training step (a step trains "
                f"{self._step_samples}); the last error, for prompt "
                f"{prompt['prompt_index']}: {shown}; all errors: {self._path}"
            )


def first_line(error: str) -> str:
    """Return an error without its traceback, which follows in the lines after the first."""
    return error.partition("\n")[0]


def build_failed_samples(cfg: Settings, attempt: int, note: Callable[[str], None]) -> FailedSamples:
    """Build `FailedSamples` from the config."""
    step_samples, logs = cfg.groups_per_step * cfg.group_size, Path(cfg.output_dir) / "logs"
    return FailedSamples(cfg.max_failed_samples, step_samples, logs, attempt, note)
