"""Appends to and reads JSON Lines files, and replaces whole files atomically."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ANSWERS = "evaluation_answers.jsonl"
"""File with one line for each logged prompt of each evaluation: the prompt and its responses."""
EVALUATIONS = "evaluations.jsonl"
"""File with one line for each evaluation: the success rate on each prompt."""
FAILURES = "failures.jsonl"
"""File with one line for each time that an error or a user ended the run: the number of the start
or restart (`attempt`), and the `error` (null if a user stopped it)."""
Record = dict[str, Any]
_DECODER = json.JSONDecoder(parse_constant=lambda _: None)  # NaN and infinity


def cut_torn_line(path: Path) -> None:
    """Remove the incomplete last line that a killed process may have left."""
    if path.exists():
        with path.open("r+b") as file:
            file.truncate(file.read().rfind(b"\n") + 1)


def append_record(path: Path, record: Mapping[str, Any]) -> None:
    """Append one line of JSON; it stays in the file even if this process then dies."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")
    except OSError as error:
        raise OSError(error.errno, f"cannot be written: {error.strerror}", str(path)) from error


def records_of(path: Path, word: bytes = b"{") -> Iterator[Record]:
    """Yield the JSON object of each line that contains `word`; lines without it are not parsed.

    If the file is missing, nothing is yielded. A line without a JSON object is skipped: a run may
    be writing the file, or was killed.
    """
    if path.is_file():
        with path.open("rb") as lines:
            for line in lines:
                if word in line and (record := record_in(line)) is not None:
                    yield record


def record_in(line: bytes) -> Record | None:
    """Return the JSON object in a line; None if it has none, such as an incomplete last line."""
    try:
        found = _DECODER.decode(line.decode())
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def write_whole(target: Path, content: str | bytes, durable: bool = False) -> None:
    """Replace a file atomically: if this fails, the old file stays.

    If `durable`, the new content is on disk before the old file is replaced. A link or pipe at the
    target's path is replaced, not written to.
    """
    unfinished = target.with_name(f".{target.name}.{secrets.token_hex(8)}.part")
    try:
        with unfinished.open("xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(unfinished, target)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise
