"""Counts what a run has cost so far, over all of its attempts: wall-clock time and restarts."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_RESTARTS = ("restart", "rollback")
"""Events of which each is the restart of a role, or of all trainers together."""
_WALL_CLOCK = "time/wall_clock"


class RunTotals:
    """Measures wall-clock time and counts restarts; a resumed run goes on from its logs."""

    def __init__(self, logs: Path) -> None:
        self._began = time.perf_counter()
        logged = _records(logs / "metrics.jsonl", f'"{_WALL_CLOCK}": ')
        took = [record.get(_WALL_CLOCK) for record in logged]
        self._earlier_s = max((s for s in took if isinstance(s, float)), default=0.0)
        path = logs.parent / "receipts.jsonl"
        events = (_records(path, f'{{"event": "{kind}"') for kind in _RESTARTS)
        self._restarts = sum(_is_restart(event) for kind in events for event in kind)

    def follow(self, event: Mapping[str, Any]) -> None:
        """Count an event of the run if it is a restart."""
        self._restarts += _is_restart(event)

    def metrics(self) -> dict[str, float]:
        """Return the seconds that the run has taken, start-up included, and its restarts."""
        return {
            _WALL_CLOCK: self._earlier_s + time.perf_counter() - self._began,
            "restarts": self._restarts,
        }


def _is_restart(event: Mapping[str, Any]) -> bool:
    """Return whether an event restarts something; a role that is given up is not restarted."""
    return event.get("event") in _RESTARTS and not event.get("given_up")


def _records(path: Path, mark: str) -> Iterator[Mapping[str, Any]]:
    """Yield the records of those complete lines that contain a mark; parsing all would be slow."""
    if not path.is_file():
        return
    with path.open("rb") as lines:
        for line in lines:
            if mark.encode() in line:
                with contextlib.suppress(ValueError):  # of a killed process
                    yield json.loads(line)
