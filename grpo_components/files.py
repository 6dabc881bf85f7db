"""Files of one record per line, to which one life of a process after the other appends."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TextIO


def cut_torn_line(path: Path) -> None:
    """Remove what a killed process wrote of a record that it did not end."""
    if path.exists():
        with path.open("r+b") as file:
            file.truncate(file.read().rfind(b"\n") + 1)


def append_line(file: TextIO, line: str) -> None:
    """Write one line of a run's file, out to the operating system.

    Args:
        file: opened for appending.
        line: without its end.

    Raises:
        OSError: naming the file, if it cannot be written; no part of the line is written later.
    """
    try:
        file.write(line + "\n")
        file.flush()
    except OSError as error:
        with contextlib.suppress(OSError):  # or what is left of the line is tried at every close
            file.close()
        raise OSError(error.errno, f"cannot be written: {error.strerror}", file.name) from error
