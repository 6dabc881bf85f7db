"""Reads files of an untrusted folder and notes what is skipped."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_tools.report.safe_text import text

MAX_LINE_BYTES = 64 * 2**20
"""Maximum length of a line; from a longer line on, a file is skipped."""
INCOMPLETE = "incomplete last line"
"""Reason for skipping a line that a process was killed while writing, or is still writing."""
_MAX_LEVELS = 16
_MAX_DIGITS = 1000
_MAX_INTEGER = 2**53
_MAX_FLOAT = 1e100
"""Larger numbers are skipped, so that sums and differences stay finite."""
_MAX_NOTE_CHARS = 200


@dataclass
class _Lines:
    """The skipped lines of one file."""

    count: int
    first: int
    """Number of the first skipped line, from 1."""
    why: str
    """Reason why the first skipped line was skipped."""


@dataclass
class Unread:
    """Reads the files of one folder and notes for each file what is skipped."""

    folder: Path
    """The folder; links that lead out of it are not followed."""
    _files: dict[str, str] = field(default_factory=dict)
    _lines: dict[str, _Lines] = field(default_factory=dict)

    def skip_file(self, path: Path, why: str) -> None:
        """Note that a file, or the rest of it, is skipped."""
        self._files.setdefault(self._name(path), why)

    def skip_line(self, path: Path, number: int, why: str) -> None:
        """Note that a line, or a part of it, is skipped."""
        lines = self._lines.setdefault(self._name(path), _Lines(0, number, why))
        lines.count += 1

    def has_skipped(self, path: Path) -> bool:
        """Return whether any part of a file was skipped."""
        return self._name(path) in self._files | self._lines

    def notes(self) -> list[str]:
        """Return what was skipped, as lines of plain text that begin with the file's name."""
        found = [f"{name}: {why}" for name, why in self._files.items()]
        for name, lines in self._lines.items():
            several = f"{lines.count:,} lines, first line" if lines.count > 1 else "line"
            found.append(f"{name}: {several} {lines.first:,}: {lines.why}")
        return [text(note, _MAX_NOTE_CHARS) for note in found]

    def may_read(self, path: Path) -> bool:
        """Return whether a path is a regular file inside the folder; note a path that is not."""
        try:
            if not path.is_symlink() and not path.exists():
                return False
            why = "" if path.is_file() else "not a regular file"
            if not why and not path.resolve().is_relative_to(self.folder.resolve()):
                why = "a link that leads out of the folder"
        except (OSError, RuntimeError) as error:  # circular links
            why = f"cannot be read: {getattr(error, 'strerror', None) or 'circular links'}"
        if why:
            self.skip_file(path, why)
        return not why

    def lines(self, path: Path) -> Iterator[tuple[int, int, bytes]]:
        """Yield the complete lines of a file; nothing if the file is missing."""
        if not self.may_read(path):
            return
        number = start = 0
        try:
            with path.open("rb") as file:
                while line := file.readline(MAX_LINE_BYTES + 1):
                    number += 1
                    if len(line) > MAX_LINE_BYTES:
                        self.skip_file(
                            path,
                            f"stopped at line {number:,}: longer than {MAX_LINE_BYTES:,} bytes",
                        )
                        return
                    if not line.endswith(b"\n"):
                        self.skip_line(path, number, INCOMPLETE)
                        return
                    yield number, start, line
                    start += len(line)
        except OSError as error:
            self.skip_file(path, f"stopped after line {number:,}: {error.strerror}")

    def head(self, path: Path, max_bytes: int) -> str:
        """Return the beginning of a text file; empty if the file is missing."""
        if not self.may_read(path):
            return ""
        try:
            with path.open("rb") as file:
                return file.read(max_bytes).decode(errors="replace")
        except OSError as error:
            self.skip_file(path, f"cannot be read: {error.strerror}")
            return ""

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self.folder) if path.is_relative_to(self.folder) else path)


class ObjectReader:
    """Parses JSON objects; NaN, infinity and numbers too large for a page become None."""

    def __init__(self) -> None:
        self.too_large = 0
        """Count of the numbers that were too large so far."""
        self._decoder = json.JSONDecoder(
            parse_int=self._integer, parse_float=self._number, parse_constant=lambda _: None
        )

    def read(self, line: bytes) -> dict[str, Any] | None:
        """Parse one line; return None if it is not an object or is nested over 16 levels deep."""
        try:
            record = self._decoder.decode(line.decode())
        except (ValueError, RecursionError):
            return None
        level = [record]
        for _ in range(_MAX_LEVELS):
            level = [child for parent in level for child in _children(parent)]
            if not level:
                return record if isinstance(record, dict) else None
        return None

    def _integer(self, digits: str) -> int | None:
        if len(digits) > _MAX_DIGITS:
            raise ValueError(f"an integer of {len(digits)} digits")
        value = int(digits)
        if abs(value) > _MAX_INTEGER:
            self.too_large += 1
            return None
        return value

    def _number(self, literal: str) -> float | None:
        value = float(literal)
        if not math.isfinite(value):
            return None
        if abs(value) > _MAX_FLOAT:
            self.too_large += 1
            return None
        return value


def _children(value: Any) -> list[Any]:
    found = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [child for child in found if isinstance(child, dict | list)]
