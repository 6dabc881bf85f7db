"""Appends to files of one record per line, which a restarted process continues."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TextIO


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
