"""What a run has written down, read back while it runs, after it was killed, and over attempts."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

from grpo_components.report.unread import ObjectReader, Unread

Record = dict[str, Any]
T = TypeVar("T")
_FIRST_AND_LAST = 10
NUMBER = (int, float)
FAILURES = "failures.jsonl"
"""Of each attempt that an error or a person ended: `attempt`, and `error` or null."""


def read_records(
    path: Path, shape: Mapping[str, Any] | None = None, unread: Unread | None = None
) -> Iterator[Record]:
    """The JSON objects of a file of lines; nothing if there is no file.

    A line that is no such object is passed over: the last one of a run that is being written, or
    that was killed, may be torn.

    Args:
        path: of the file.
        shape: what the objects have at least, as in `fits`.
        unread: gets what is passed over.
    """
    unread, reader = unread or Unread(path.parent), ObjectReader()
    for number, _, line in unread.lines(path):
        before = reader.too_large
        record = reader.read(line)
        if record is None:
            unread.line(path, number, "no JSON object that can be read")
        elif reader.too_large > before:
            unread.line(path, number, "a number that is too large is left out")
        if record is not None:
            if fits(record, shape or {}):
                yield record
            elif reader.too_large == before:
                unread.line(path, number, "a field is missing, or is of another kind")


def fits(value: Any, shape: Any) -> bool:
    """Whether a JSON value can be read as what it should be.

    Args:
        value: of any kind.
        shape: a type or types, [shape of the items], or {name: shape} of the fields that it needs.
    """
    if isinstance(shape, Mapping):
        return isinstance(value, dict) and all(
            name in value and fits(value[name], needed) for name, needed in shape.items()
        )
    if isinstance(shape, list):
        return isinstance(value, list) and all(fits(item, shape[0]) for item in value)
    return isinstance(value, shape)


@dataclass
class Attempts:
    """Which records count: a later attempt that has done a step replaces those from there on."""

    steps_done: dict[int, int] = field(default_factory=dict)
    """Of each attempt that has done a step, the steps that were done when it began."""
    _order: list[int] = field(default_factory=list)
    _least: list[int] = field(default_factory=list)
    """Of the attempts in order, and of each and all later ones the least steps done."""

    def counts(self, record: Mapping[str, Any]) -> bool:
        """Whether no later attempt has gone back behind this record's step.

        Args:
            record: with `step` and `attempt`.
        """
        if len(self._order) != len(self.steps_done):
            self._order = sorted(self.steps_done)
            backwards = accumulate((self.steps_done[a] for a in reversed(self._order)), min)
            self._least = [*backwards][::-1]
        later = bisect_right(self._order, record.get("attempt", 0))
        return later == len(self._order) or record.get("step", 0) <= self._least[later]


def first_and_last(steps: Sequence[T]) -> tuple[Sequence[T], Sequence[T]]:
    """Equally many of a run's first and last steps, whose means tell what it has changed.

    Args:
        steps: of the run.

    Returns:
        Up to 10 of each, which share no step where there is more than one.
    """
    number = max(1, min(_FIRST_AND_LAST, len(steps) // 2))
    return steps[:number], steps[-number:]


def read_failures(path: Path, unread: Unread | None = None) -> dict[int, str | None]:
    """The error that ended each attempt that failed; None where a person stopped it.

    Args:
        path: of failures.jsonl; it may be missing.
        unread: gets what is passed over.
    """
    shape = {"attempt": int, "error": (str, type(None))}
    return {record["attempt"]: record["error"] for record in read_records(path, shape, unread)}


@dataclass
class Receipts:
    """What the receipts say of attempts and of groups that were never trained."""

    attempts: Attempts = field(default_factory=Attempts)
    starts: list[Record] = field(default_factory=list)
    """The start record of each attempt."""
    ends: dict[int, Record] = field(default_factory=dict)
    """The end record of each attempt that wrote one."""
    last_steps: dict[int, int] = field(default_factory=dict)
    """The last step that each attempt has done."""
    trained_tokens: dict[int, int] = field(default_factory=dict)
    """Of each step, as the last attempt did it."""
    drops: list[Record] = field(default_factory=list)
    """Groups that were dropped: step, attempt, group_id, prompt_index, epoch, reason, reissue."""


def read_receipts(path: Path, unread: Unread | None = None) -> Receipts:
    """Read a run's receipts.

    Args:
        path: of receipts.jsonl; it may be missing.
        unread: gets what is passed over.
    """
    receipts = Receipts()
    prompts: dict[int, Record] = {}
    for record in read_records(path, _RECEIPT, unread):
        kind, attempt = record["record"], record["attempt"]
        if kind not in _RECEIPTS or not fits(record, _RECEIPTS[kind]):
            if unread is not None:
                unread.file(path, "a record without its step is left out")
            continue
        if kind == "start":
            receipts.starts.append(record)
            continue
        if kind == "end":
            receipts.ends[attempt] = record
        elif receipts.starts:
            receipts.attempts.steps_done.setdefault(attempt, receipts.starts[-1]["steps_done"])
        receipts.last_steps[attempt] = record["step"]
        if fits(record, {"token_versions": dict}):
            found = record["token_versions"].values()
            receipts.trained_tokens[record["step"]] = sum(n for n in found if fits(n, int))
        events = record.get("events", [])
        for event in events if fits(events, [dict]) else ():
            kind = next((kind for kind in _ENDS if kind in event), None)
            if kind is not None and not fits(event, {kind: int}):
                if unread is not None:
                    unread.file(path, "an event without the number of its group is left out")
            elif "issued" in event:
                prompt = {key: event.get(key) for key in ("prompt_index", "epoch")}
                prompts[event["issued"]] = prompt
            elif "trained" in event:
                prompts.pop(event["trained"], None)
            elif "dropped" in event:
                group_id = event["dropped"]
                drop = {"step": record["step"], "attempt": attempt, "group_id": group_id}
                why = {key: event.get(key) for key in ("reason", "reissue")}
                receipts.drops.append({**drop, **prompts.pop(group_id, {}), **why})
    receipts.drops = [drop for drop in receipts.drops if receipts.attempts.counts(drop)]
    return receipts


def read_metrics(path: Path, attempts: Attempts, unread: Unread | None = None) -> list[Record]:
    """The metrics of each step, of the last attempt that did it, in the order of steps.

    Args:
        path: of metrics.jsonl; it may be missing.
        attempts: of the run; attempts that only the metrics know of are added.
        unread: gets what is passed over.
    """
    records = list(read_records(path, {"step": int, "attempt": int}, unread))
    for record in records:
        if record["step"] > 0:
            attempts.steps_done.setdefault(record["attempt"], record["step"] - 1)
    counted = {record["step"]: record for record in records if attempts.counts(record)}
    if records and not counted and unread is not None:
        unread.file(path, "by the receipts, later attempts have done all of its steps again")
    return [counted[step] for step in sorted(counted)]


_ENDS = ("issued", "trained", "dropped")
"""Kinds of events that are read."""
_RECEIPT = {"record": str, "attempt": int}
_RECEIPTS = {"start": {"steps_done": int}, "step": {"step": int}, "end": {"step": int}}
