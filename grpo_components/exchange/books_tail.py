"""Reads from the event log what a killed attempt did after its last receipt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from grpo_components.shapes import fits


class _Finish(TypedDict):
    group: int
    response_tokens: list[int]


class _Drop(TypedDict):
    groups: list[int]
    reason: str


class _Sample(TypedDict):
    groups: list[int]


class _Step(TypedDict):
    step: int


_SHAPES = {"finish": _Finish, "drop": _Drop, "sample": _Sample, "step": _Step}


def read_tail(path: Path, attempt: int, step: int) -> list[dict[str, Any]] | None:
    """Return the events of an attempt that no record of the receipts has.

    The event log is flushed with each event, before the receipts get it.

    Args:
        path: path of logs/events.jsonl; the file may be missing.
        attempt: number of the attempt.
        step: last step that the attempt recorded, or `steps_done` of its start record.

    Returns:
        The events `finish`, `drop`, `sample` and `step` after that step, in order; None if the log
        does not have the attempt.
    """
    found: list[dict[str, Any]] | None = None
    if not path.is_file():
        return None
    mark = f'"attempt": {attempt},'.encode()
    with path.open("rb") as lines:
        for line in lines:
            if mark not in line or not line.endswith(b"\n"):
                continue
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if not isinstance(event, dict) or event.get("attempt") != attempt:
                continue
            found = [] if found is None else found
            name = event.get("event")
            if name not in _SHAPES or not fits(event, _SHAPES[name]):
                continue
            if name == "step" and event["step"] <= step:
                found = []
            else:
                found.append(event)
    return found
