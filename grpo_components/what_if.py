"""Where a what-if leaves the run that it repeats, and what it changes from there on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class WhatIf:
    """The part of a run that repeats a recorded one, before other keys apply."""

    step: int
    """The step, from 1, that is the first to differ; all before it are repeated."""
    keeps_batch: bool
    """Whether that step trains the recorded batch; False: the state is that after the step before,
    and groups in flight are generated again."""
    changed: tuple[str, ...]
    """Keys whose values differ from the recorded run's."""
    later: Any
    """Checked settings of the part that follows."""

    def leaves(self, repeated: str) -> str:
        """Return one line on what was repeated and what changes now."""
        kept = "trains the recorded batch" if self.keeps_batch else "makes a batch of its own"
        return (
            f"what-if: steps 1 to {self.step - 1} repeated, {repeated}; step {self.step} {kept}, "
            f"and the run is live from there on, with other {', '.join(self.changed)}"
        )
