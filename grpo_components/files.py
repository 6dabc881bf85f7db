"""Files of one record per line: names, and appending after a restart."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO, TypeVar

ANSWERS = "evaluation_answers.jsonl"
"""Has one line for each logged prompt of each evaluation."""
FAILURES = "failures.jsonl"
"""Has one line per attempt that ended early: `attempt`, `error` (null if a person stopped it)."""
_MAX_STEPS_PER_END = 10
T = TypeVar("T")


def cut_torn_line(path: Path) -> None:
    """Remove the incomplete last line that a killed process may have left."""
    if path.exists():
        with path.open("r+b") as file:
            file.truncate(file.read().rfind(b"\n") + 1)


def append_line(file: TextIO, line: str) -> None:
    """Append one line and flush it to the operating system."""
    try:
        file.write(line + "\n")
        file.flush()
    except OSError as error:
        with contextlib.suppress(OSError):  # else every later close would retry the unwritten rest
            file.close()
        raise OSError(error.errno, f"cannot be written: {error.strerror}", file.name) from error


def first_and_last(steps: Sequence[T]) -> tuple[Sequence[T], Sequence[T]]:
    """Return the first and the last steps of a run, to compare them."""
    number = max(1, min(_MAX_STEPS_PER_END, len(steps) // 2))
    return steps[:number], steps[-number:]
