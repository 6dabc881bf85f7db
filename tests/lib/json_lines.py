"""Writes files of JSON lines, as those of a run or a data set."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write_lines(path: Path, records: Iterable[Any], torn: str = "") -> Path:
    """Write each record as a line; what is `torn` has no end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records) + torn)
    return path
