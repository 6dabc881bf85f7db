"""Reads files of an untrusted folder, and notes what it skips."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_components.report.safe_text import text

MAX_LINE_BYTES = 64 * 2**20
"""After a longer line the rest of the file is skipped."""
_MAX_LEVELS = 16
_MAX_DIGITS = 1000
_MAX_INTEGER = 2**53
_MAX_FLOAT = 1e100
"""Keeps sums and differences of numbers finite."""
_MAX_NOTE_CHARS = 200


@dataclass
class _Lines:
    """Lines of one file that are skipped."""

    count: int
    first: int
    why: str
    """Reason of the first one."""


@dataclass
class Unread:
    """Reads the files of one folder and notes, by file, what it skips."""

    folder: Path
    """Links that lead out of this folder are not followed."""
    _files: dict[str, str] = field(default_factory=dict)
    _lines: dict[str, _Lines] = field(default_factory=dict)

    def skip_file(self, path: Path, why: str) -> None:
        """Note that a file, or its rest, is skipped.

        Args:
            path: of the file.
            why: reason, in a few words.
        """
        self._files.setdefault(self._name(path), why)

    def skip_line(self, path: Path, number: int, why: str) -> None:
        """Note that a line, or a part of it, is skipped.

        Args:
            path: of the file.
            number: of the line, from 1.
            why: reason, in a few words.
        """
        lines = self._lines.setdefault(self._name(path), _Lines(0, number, why))
        lines.count += 1

    def has_skipped(self, path: Path) -> bool:
        """Whether any part of a file was skipped.

        Args:
            path: of the file.
        """
        return self._name(path) in self._files | self._lines

    def notes(self) -> list[str]:
        """What was skipped: one line of plain text per file."""
        found = [f"{name}: {why}" for name, why in self._files.items()]
        for name, lines in self._lines.items():
            several = f"{lines.count:,} lines, first line" if lines.count > 1 else "line"
            found.append(f"{name}: {several} {lines.first:,}: {lines.why}")
        return [text(note, _MAX_NOTE_CHARS) for note in found]

    def may_read(self, path: Path) -> bool:
        """Whether a path is a regular file inside the folder; anything else that exists is noted.

        Args:
            path: of the file; it may be missing.
        """
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
        """Yield the complete lines of a file; nothing if it is missing.

        Args:
            path: of the file.

        Yields:
            Line number from 1, byte offset, and the line with its line end.
        """
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
                        self.skip_line(path, number, "incomplete last line")
                        return
                    yield number, start, line
                    start += len(line)
        except OSError as error:
            self.skip_file(path, f"stopped after line {number:,}: {error.strerror}")

    def head(self, path: Path, max_bytes: int) -> str:
        """The beginning of a text file; empty if it is missing.

        Args:
            path: of the file.
            max_bytes: to read at most.
        """
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
        """How many numbers were too large so far."""
        self._decoder = json.JSONDecoder(
            parse_int=self._integer, parse_float=self._number, parse_constant=lambda _: None
        )

    def read(self, line: bytes) -> dict[str, Any] | None:
        """Parse one line; None if it is not an object, or more than 16 levels deep."""
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
