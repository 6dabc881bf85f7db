"""Counts skipped steps, and ends the run after too many."""

from __future__ import annotations

from collections.abc import Callable

from grpo_components.errors import SkippedStepsError


class SkippedSteps:
    """Reports skipped steps, and ends the run when too many follow each other."""

    def __init__(self, max_skipped_steps: int, note: Callable[[str], None]) -> None:
        self._max_skipped_steps, self._note = max_skipped_steps, note
        self._in_a_row = 0
        self._skipped: dict[int, str] = {}
        """Step -> why it was skipped, empty if it trained; a repeated step counts once."""

    def record(self, step: int, trained: bool, why: str) -> None:
        """Count a step; a SkippedStepsError if max_skipped_steps in a row were skipped."""
        self._skipped[step] = "" if trained else why
        if trained:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        self._note(f"step {step} is skipped: {why}")
        if self._in_a_row >= self._max_skipped_steps:
            raise SkippedStepsError(
                f"max_skipped_steps: {self._max_skipped_steps} given, and the {self._in_a_row} "
                f"steps {step - self._in_a_row + 1} to {step} in a row were skipped, the last "
                f"because {why}"
            )

    def summary(self) -> str:
        """Return how many steps were skipped and which was the first; empty if none was."""
        skipped = [step for step, why in self._skipped.items() if why]
        if not skipped:
            return ""
        return f"{len(skipped)} of {len(self._skipped)}, the first was step {skipped[0]}"

    def check_trained(self) -> None:
        """Raise a SkippedStepsError if every step of the run was skipped."""
        reasons = [*self._skipped.values()]
        if reasons and all(reasons):
            raise SkippedStepsError(
                f"nothing was trained: all {len(reasons)} steps of the run were skipped, the first "
                f"because {reasons[0]}"
            )
