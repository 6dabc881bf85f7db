"""Reads from the event log what a killed attempt did after its last receipt."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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


def read_tail(
    events: Iterable[Mapping[str, Any]], attempt: int, step: int
) -> list[Mapping[str, Any]] | None:
    """Return the events of an attempt that no record of the receipts has.

    The event log is flushed with each event, before the receipts get it.

    Args:
        events: events of logs/events.jsonl; those with unexpected fields are skipped.
        attempt: number of the attempt.
        step: last step that the attempt recorded, or `steps_done` of its start record.

    Returns:
        The events `finish`, `drop`, `sample` and `step` after that step, in order; None if the log
        does not have the attempt.
    """
    found: list[Mapping[str, Any]] | None = None
    for event in events:
        if event.get("attempt") != attempt:
            continue
        found = [] if found is None else found
        shape = _SHAPES.get(str(event.get("event")))
        if shape is None or not fits(event, shape):
            continue
        if event["event"] == "step" and event["step"] <= step:
            found = []
        else:
            found.append(event)
    return found
