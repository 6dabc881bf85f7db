"""Samples whose reward or environment failed: counted, written down, and bounded."""

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

_SHOWN = 200
"""Characters of an error in a line for people; the file has all of it."""


class FailedSamples:
    """Counts failed samples from one training step to the next, and ends the run at `most`.

    Each goes to `failed_samples.jsonl` with its prompt, evaluations' as well; a person is told of
    the first after every step.

    Args:
        most: so many between two training steps end the run.
        logs: folder of the file, which is made with the first failure.
        attempt: which life of the run.
        note: shows a line.
    """

    def __init__(self, most: int, logs: Path, attempt: int, note: Callable[[str], None]) -> None:
        self._most, self._path = most, logs / "failed_samples.jsonl"
        self.attempt, self._note = attempt, note
        self._count = 0

    def in_group(self, entry: LedgerEntry, group: GroupSummary) -> bool:
        """Count those of one group.

        Args:
            entry: of the group.
            group: as it was generated.

        Returns:
            Whether all of its samples failed, so that nothing can be learned from it.

        Raises:
            FailedSamplesError: if there were too many since the last step.
        """
        what = {"group_id": entry.group_id, "epoch": entry.epoch}
        self._record(entry.prompt, group.errors, f"group {entry.group_id}", what)
        return len(group.errors) == len(group.rewards)

    def in_evaluation(self, step: int, results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Count those of an evaluation.

        Args:
            step: training steps done.
            results: `Generator.evaluate`'s, of all prompts.

        Returns:
            The results that were scored.

        Raises:
            FailedSamplesError: if there were too many since the last step, or none was scored.
        """
        for result in results:
            errors = [] if result["error"] is None else [result["error"]]
            self._record(result, errors, f"the evaluation at step {step}", {"evaluation": step})
        scored = [result for result in results if result["error"] is None]
        if not scored:
            error = results[0]["error"]
            raise FailedSamplesError(f"no sample of an evaluation could be scored; first: {error}")
        return scored

    def count(self) -> int:
        """How many failed since the last call, which is once in every training step."""
        count, self._count = self._count, 0
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
            "errors": dict(Counter(errors)),  # how many samples met each
        }
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        shown = f"{errors[-1]:.{_SHOWN}}"
        if self._count == 0:
            self._note(f"{len(errors)} failed in {where}: {shown} (all are in {self._path})")
        self._count += len(errors)
        if self._count >= self._most:
            raise FailedSamplesError(
                f"max_failed_samples: {self._most} given, and {self._count} samples failed since "
                f"the last training step; the last one, of prompt {prompt['prompt_index']}: "
                f"{shown}; all are in {self._path}"
            )


def build_failed_samples(cfg: Settings, attempt: int, note: Callable[[str], None]) -> FailedSamples:
    """The count of failed samples of a run.

    Args:
        cfg: checked by preflight.
        attempt: which life of the run.
        note: shows a line.
    """
    return FailedSamples(cfg.max_failed_samples, Path(cfg.output_dir) / "logs", attempt, note)
