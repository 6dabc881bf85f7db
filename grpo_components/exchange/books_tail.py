"""Reads from the event log what a killed attempt did after its last receipt."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
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


@dataclass
class Tail:
    """What an attempt did after its last record."""

    events: list[Mapping[str, Any]] = field(default_factory=list)
    """Events `finish`, `drop`, `sample` and `step`, in order."""
    gap: int | None = None
    """Number of the last event before one that the log lacks; None if it lacks none."""


def read_tail(events: Iterable[Mapping[str, Any]], attempt: int, step: int) -> Tail | None:
    """Return the events of an attempt that no record of the receipts has.

    The event log is flushed with each event, before the receipts get it.
    """
    found: Tail | None = None
    last: int | None = None
    for event in events:
        if event.get("attempt") != attempt:
            continue
        found, number = found or Tail(), event.get("number")
        is_next = last is None or number == last + 1 or event.get("event") == "start"
        if not is_next and found.gap is None:
            found.gap = last
        last = number if isinstance(number, int) else last
        shape = _SHAPES.get(str(event.get("event")))
        if shape is None or not fits(event, shape):
            continue
        if event["event"] == "step" and event["step"] <= step:
            found = Tail()
        else:
            found.events.append(event)
    return found
