"""Records what rewards gave that may differ from call to call, and repeats it in a replay."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import defaultdict, deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from grpo_components.files import append_line, cut_torn_line

Outcome = float | str
"""What one reward gave one sample: its value, or the error because of which the sample failed."""


class ScoreLog:
    """The outcomes of the varying rewards of one generator, by the content of the sample.

    Any thread may call its methods. The file begins with the first outcome.
    """

    def __init__(
        self, path: Path | None = None, replayed: Path | None = None, restart_count: int = 0
    ) -> None:
        self._path, self._restart_count = path, restart_count
        self._lock = threading.Lock()
        self._file: TextIO | None = None
        self._replayed = None if replayed is None else _read(replayed, restart_count)

    def record(self, sample: Mapping[str, Any], outcomes: Mapping[str, Outcome]) -> None:
        """Write what the varying rewards gave a sample, before its score is used."""
        if not outcomes or self._path is None:
            return
        with self._lock:
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                cut_torn_line(self._path)
                self._file = self._path.open("a", encoding="utf-8")
                append_line(self._file, json.dumps({"life": self._restart_count}))
            line = {"sample": _key(sample), "outcomes": dict(outcomes)}
            append_line(self._file, json.dumps(line))

    def recorded(self, sample: Mapping[str, Any]) -> dict[str, Outcome] | None:
        """Return the recorded outcomes of a sample."""
        if self._replayed is None:
            return None
        with self._lock:
            found = self._replayed.get(_key(sample), deque())
            return (found.popleft() if len(found) > 1 else found[0]) if found else {}

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._file is not None:
                self._file.close()


def open_score_log(
    number: int, folder: str | None, replayed_folder: str | None, restart_count: int
) -> ScoreLog:
    """Open a generator's log of outcomes."""
    name = f"outcomes_generator_{number}.jsonl"
    path, replayed = (None if at is None else Path(at) / name for at in (folder, replayed_folder))
    return ScoreLog(path, replayed, restart_count)


def _key(sample: Mapping[str, Any]) -> str:
    text = json.dumps(sample, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _read(path: Path, restart_count: int) -> dict[str, deque[dict[str, Outcome]]]:
    """Read the outcomes of the process with this restart count; a run without any has no file."""
    found: defaultdict[str, deque[dict[str, Outcome]]] = defaultdict(deque)
    if path.is_file():
        life = -1
        with path.open(encoding="utf-8") as lines:
            for line in map(json.loads, lines):
                life = line.get("life", life)
                if life == restart_count and "sample" in line:
                    found[line["sample"]].append(line["outcomes"])
    return dict(found)
