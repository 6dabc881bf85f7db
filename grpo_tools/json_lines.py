"""Reads JSON-lines files of a run that may be running or killed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Record = dict[str, Any]
_DECODER = json.JSONDecoder(parse_constant=lambda _: None)  # NaN and infinity


def records_of(path: Path, word: bytes = b"{") -> Iterator[Record]:
    """Yield the JSON objects of those lines that contain a word; none if the file is missing."""
    if not path.is_file():
        return
    with path.open("rb") as lines:
        for line in lines:
            if word in line and (record := record_in(line)) is not None:
                yield record


def record_in(line: bytes) -> Record | None:
    """Return the JSON object of a line; None for another line, such as an incomplete last one."""
    try:
        found = _DECODER.decode(line.decode())
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
