"""Handles skipped steps: keeps their batches for inspection, and ends the run after too many."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grpo_components.errors import SkippedStepsError
from grpo_components.trajectory import PackedTrajectories

_README = """\
Training step {step} was skipped: {why}.
Load its batch with:
  from grpo_components.training.skipped_steps import load_batch
  packed, advantages, metrics = load_batch("{folder}")
(grpo_components.trajectory.unpack(packed) turns it into records; no file here is a pickle.)
"""


class SkippedSteps:
    """Reports skipped steps, and ends the run when too many follow each other."""

    def __init__(
        self, max_skipped_steps: int, output_dir: str, note: Callable[[str], None]
    ) -> None:
        self._max_skipped_steps, self._note = max_skipped_steps, note
        self._folder = skipped_folder(output_dir)
        self._in_a_row = 0
        self._skipped: dict[int, str] = {}
        """Step -> why it was skipped, empty if it trained; a repeated step counts once."""

    def record(self, step: int, trained: bool, why: str) -> None:
        """Count a step; call it after every step."""
        self._skipped[step] = "" if trained else why
        if trained:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        batch = batch_folder(self._folder, step)
        self._note(f"step {step} is skipped: {why}; its batch: {batch}")
        if self._in_a_row >= self._max_skipped_steps:
            raise SkippedStepsError(
                f"max_skipped_steps: {self._max_skipped_steps} given, and the {self._in_a_row} "
                f"steps {step - self._in_a_row + 1} to {step} in a row were skipped, the last "
                f"because {why}; their batches and metrics are in {self._folder}"
            )

    def summary(self) -> str:
        """Return how many steps were skipped and which was the first; empty if none was."""
        skipped = [step for step, why in self._skipped.items() if why]
        if not skipped:
            return ""
        return f"{len(skipped)} of {len(self._skipped)}, the first was step {skipped[0]}"

    def check_trained(self) -> None:
        """Check that at least one step trained; call it at the end of the run."""
        reasons = [*self._skipped.values()]
        if reasons and all(reasons):
            raise SkippedStepsError(
                f"nothing was trained: all {len(reasons)} steps of the run were skipped, the first "
                f"because {reasons[0]}; their batches and metrics are in {self._folder}"
            )


def skipped_folder(output_dir: str) -> Path:
    """Return the folder in which a run keeps the batches of its skipped steps."""
    return Path(output_dir) / "skipped"


def batch_folder(folder: Path, step: int) -> Path:
    """Return the folder of one skipped step."""
    return folder / f"step_{step}"


def dump_batch(
    folder: Path,
    step: int,
    batch: PackedTrajectories,
    advantages: NDArray[np.float32],
    metrics: Mapping[str, Any],
) -> None:
    """Write the batch and the metrics of a skipped step to files that are read without pickle.

    Args:
        folder: folder of all skipped steps.
        step: number of the step, from 1.
        batch: S packed trajectories.
        advantages: [S] float32, one per trajectory.
        metrics: metrics of the step; `skipped_because` is the reason why it was skipped.
    """
    target = batch_folder(folder, step)
    target.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, NDArray[Any]] = {"advantages": advantages}
    others: dict[str, Any] = {}
    for name, value in batch.items():
        if isinstance(value, tuple):
            arrays[name], arrays[f"{name}.lengths"] = value
        elif isinstance(value, np.ndarray):
            arrays[name] = value
        else:
            others[name] = value
    np.savez(target / "trajectories.npz", allow_pickle=False, **arrays)
    # Python's JSON keeps NaN and Infinity, which are often the cause of a skip.
    (target / "trajectories.json").write_text(json.dumps(others, default=float))
    (target / "metrics.json").write_text(json.dumps(dict(metrics), indent=1, default=float))
    why = metrics["skipped_because"]
    (target / "README").write_text(_README.format(step=step, why=why, folder=target))


def load_batch(
    folder: str | Path,
) -> tuple[PackedTrajectories, NDArray[np.float32], dict[str, Any]]:
    """Read what `dump_batch` wrote.

    Returns:
        The packed trajectories, their advantages [S] float32, and the step's metrics.
    """
    folder = Path(folder)
    batch: PackedTrajectories = json.loads((folder / "trajectories.json").read_text())
    with np.load(folder / "trajectories.npz", allow_pickle=False) as arrays:
        advantages = arrays["advantages"]
        for name in arrays.files:
            if name == "advantages" or name.endswith(".lengths"):
                continue
            has_lengths = f"{name}.lengths" in arrays.files
            batch[name] = (arrays[name], arrays[f"{name}.lengths"]) if has_lengths else arrays[name]
    return batch, advantages, json.loads((folder / "metrics.json").read_text())
