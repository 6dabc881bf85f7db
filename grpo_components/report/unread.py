"""Reads the files of a folder that may come from elsewhere, and keeps account of what it cannot."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_components.report.shown import text

MOST_LINE_BYTES = 64 * 2**20
"""Of a line; the rest of the file is not read."""
_MOST_LEVELS = 16
_MOST_DIGITS = 1000
_LARGEST_WHOLE = 2**53
_LARGEST = 1e100
"""Of numbers, so that no sum or difference of them is infinite."""
_LONGEST = 200


@dataclass
class _Lines:
    """Lines of one file that are left out."""

    number: int
    first: int
    why: str
    """Of the first of them."""


@dataclass
class Unread:
    """What of a run's folder could not be read."""

    folder: Path
    """Whose files are read; a link that leads out of it is not followed."""
    _files: dict[str, str] = field(default_factory=dict)
    _lines: dict[str, _Lines] = field(default_factory=dict)

    def file(self, path: Path, why: str) -> None:
        """Note that a file, or the rest of it, is not read.

        Args:
            path: of the file.
            why: in a few words.
        """
        self._files.setdefault(self._name(path), why)

    def line(self, path: Path, number: int, why: str) -> None:
        """Note that a line is left out, or a part of it.

        Args:
            path: of the file.
            number: of the line, from 1.
            why: in a few words.
        """
        lines = self._lines.setdefault(self._name(path), _Lines(0, number, why))
        lines.number += 1

    def misses(self, path: Path) -> bool:
        """Whether something of a file is not read.

        Args:
            path: of the file.
        """
        return self._name(path) in self._files | self._lines

    def notes(self) -> list[str]:
        """One line of plain text per file."""
        found = [f"{name}: {why}" for name, why in self._files.items()]
        for name, lines in self._lines.items():
            several = f"{lines.number:,} lines, the first is line" if lines.number > 1 else "line"
            found.append(f"{name}: {several} {lines.first:,}: {lines.why}")
        return [text(note, _LONGEST) for note in found]

    def may_read(self, path: Path) -> bool:
        """Whether a path is a file of the folder; one that is something else is noted.

        Args:
            path: of the file; it may be missing.
        """
        try:
            if not path.is_symlink() and not path.exists():
                return False
            why = "" if path.is_file() else "it is no file"
            if not why and not path.resolve().is_relative_to(self.folder.resolve()):
                why = "it is a link that leads out of the folder"
        except (OSError, RuntimeError) as error:  # a circle of links
            why = f"it cannot be read: {getattr(error, 'strerror', None) or 'a circle of links'}"
        if why:
            self.file(path, why)
        return not why

    def lines(self, path: Path) -> Iterator[tuple[int, int, bytes]]:
        """The whole lines of a file; nothing if there is none.

        Args:
            path: of the file.

        Yields:
            Number from 1, first byte, and the line with its end.
        """
        if not self.may_read(path):
            return
        number = start = 0
        try:
            with path.open("rb") as file:
                while line := file.readline(MOST_LINE_BYTES + 1):
                    number += 1
                    if len(line) > MOST_LINE_BYTES:
                        self.file(path, f"nothing from line {number:,} on, which has no end")
                        return
                    if not line.endswith(b"\n"):
                        self.line(path, number, "the last one is cut")
                        return
                    yield number, start, line
                    start += len(line)
        except OSError as error:
            self.file(path, f"nothing after line {number:,}: {error.strerror}")

    def head(self, path: Path, most_bytes: int) -> str:
        """The beginning of a text file; empty if there is none.

        Args:
            path: of the file.
            most_bytes: to read.
        """
        if not self.may_read(path):
            return ""
        try:
            with path.open("rb") as file:
                return file.read(most_bytes).decode(errors="replace")
        except OSError as error:
            self.file(path, f"it cannot be read: {error.strerror}")
            return ""

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self.folder) if path.is_relative_to(self.folder) else path)


class ObjectReader:
    """Reads JSON objects; a number that is too large for a page, NaN and infinity become null."""

    def __init__(self) -> None:
        self.too_large = 0
        """Numbers that were left out so far."""
        self._decoder = json.JSONDecoder(
            parse_int=self._whole, parse_float=self._number, parse_constant=lambda _: None
        )

    def read(self, line: bytes) -> dict[str, Any] | None:
        """One line as an object; None where it is none, or more than 16 levels deep."""
        try:
            record = self._decoder.decode(line.decode())
        except (ValueError, RecursionError):
            return None
        level = [record]
        for _ in range(_MOST_LEVELS):
            level = [child for parent in level for child in _children(parent)]
            if not level:
                return record if isinstance(record, dict) else None
        return None

    def _whole(self, said: str) -> int | None:
        if len(said) > _MOST_DIGITS:
            raise ValueError(f"an integer of {len(said)} digits")
        value = int(said)
        if abs(value) > _LARGEST_WHOLE:
            self.too_large += 1
            return None
        return value

    def _number(self, said: str) -> float | None:
        value = float(said)
        if not math.isfinite(value):
            return None
        if abs(value) > _LARGEST:
            self.too_large += 1
            return None
        return value


def _children(value: Any) -> list[Any]:
    found = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [child for child in found if isinstance(child, dict | list)]
