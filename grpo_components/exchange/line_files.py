"""Files of one record per line, to which one life of a process after the other appends."""

from __future__ import annotations

from pathlib import Path


def cut_torn_line(path: Path) -> None:
    """Remove what a killed process wrote of a record that it did not end."""
    if path.exists():
        with path.open("r+b") as file:
            file.truncate(file.read().rfind(b"\n") + 1)
