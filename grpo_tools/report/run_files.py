"""Reads the files of a run, which may have several attempts and may be running or killed."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field
from typing_extensions import TypedDict

from grpo_components.shapes import fits
from grpo_tools.report.unread import ObjectReader, Unread

Record = dict[str, Any]
T = TypeVar("T")
Number = int | float
Items = Annotated[list[T], Field(fail_fast=True)]
"""A list whose check stops at the first item that does not fit; else each one costs memory."""
_ENDS = ("issued", "trained", "dropped")
"""Kinds of events that `read_receipts` reads; each has a group id under its own name."""
_STEPS = {"start": "steps_done", "step": "step", "end": "step"}
"""Kind of receipt -> name of the step in it."""


class StepRecord(TypedDict):
    """A record about one step of one attempt."""

    step: int
    attempt: int


class _Receipt(TypedDict):
    record: str
    attempt: int


class _Generated(TypedDict):
    generated: int
    successes: int
    scored: int


class _Failure(TypedDict):
    attempt: int
    error: str | None


def read_records(path: Path, shape: Any = Any, unread: Unread | None = None) -> Iterator[Record]:
    """Yield the JSON objects of a JSON-lines file; nothing if the file is missing.

    Lines that do not fit are skipped, such as the incomplete last line of a run that was killed or
    is still writing.
    """
    unread, reader = unread or Unread(path.parent), ObjectReader()
    for number, _, line in unread.lines(path):
        before = reader.too_large
        record = reader.read(line)
        if record is None:
            unread.skip_line(path, number, "not a JSON object")
        elif reader.too_large > before:
            unread.skip_line(path, number, "skipped a number that is too large")
        if record is not None:
            if fits(record, shape):
                yield record
            elif reader.too_large == before:
                unread.skip_line(path, number, "a field is missing or has the wrong type")


@dataclass
class Attempts:
    """Decides which records count: those of steps that no later attempt replaced.

    An attempt that trained a step replaces all steps after the one it resumed from.
    """

    steps_done: dict[int, int] = field(default_factory=dict)
    """Attempt -> number of steps done when it began; only attempts that trained a step."""
    _order: list[int] = field(default_factory=list)
    _least: list[int] = field(default_factory=list)
    """For each attempt in `_order`: the lowest `steps_done` of it and all later attempts."""

    def counts(self, record: Mapping[str, Any]) -> bool:
        """Return whether a record counts: no later attempt replaced its step."""
        if len(self._order) != len(self.steps_done):
            self._order = sorted(self.steps_done)
            backwards = accumulate((self.steps_done[a] for a in reversed(self._order)), min)
            self._least = [*backwards][::-1]
        later = bisect_right(self._order, record.get("attempt", 0))
        return later == len(self._order) or record.get("step", 0) <= self._least[later]


def read_failures(path: Path, unread: Unread | None = None) -> dict[int, str | None]:
    """Read how attempts failed: attempt -> error that ended it, or None if a person stopped it."""
    return {record["attempt"]: record["error"] for record in read_records(path, _Failure, unread)}


@dataclass
class Receipts:
    """What a report shows of a run's receipts: attempts, trained tokens and dropped groups."""

    attempts: Attempts = field(default_factory=Attempts)
    starts: list[Record] = field(default_factory=list)
    """Start record of each attempt."""
    ends: dict[int, Record] = field(default_factory=dict)
    """End record of each attempt that wrote one."""
    last_steps: dict[int, int] = field(default_factory=dict)
    """Last step of each attempt that trained a step or wrote an end record."""
    trained_tokens: dict[int, int] = field(default_factory=dict)
    """Number of trained tokens in each step, from the last attempt that trained it."""
    drops: list[Record] = field(default_factory=list)
    """Dropped groups with step, attempt, group_id, prompt_index, epoch, reason and reissue."""
    results: list[Record] = field(default_factory=list)
    """With a curriculum: records of step, attempt, and `groups` that were generated before the
    step, as tuples of prompt_index, successes and scored responses."""


def read_receipts(path: Path, unread: Unread | None = None) -> Receipts:
    """Read a run's receipts, the records of its attempts and steps."""
    receipts = Receipts()
    prompts: dict[int, Record] = {}
    for record in read_records(path, _Receipt, unread):
        kind, attempt = record["record"], record["attempt"]
        if kind not in _STEPS or not fits(record.get(_STEPS[kind]), int):
            if unread is not None:
                unread.skip_file(path, "skipped a record without its step")
            continue
        if kind == "start":
            receipts.starts.append(record)
            continue
        if kind == "end":
            receipts.ends[attempt] = record
        elif receipts.starts:
            receipts.attempts.steps_done.setdefault(attempt, receipts.starts[-1]["steps_done"])
        receipts.last_steps[attempt] = record["step"]
        if fits(record.get("token_versions"), dict):
            found = record["token_versions"].values()
            receipts.trained_tokens[record["step"]] = sum(n for n in found if fits(n, int))
        results: list[tuple[int | None, int, int]] = []
        receipts.results.append({"step": record["step"], "attempt": attempt, "groups": results})
        events = record.get("events", [])
        for event in events if fits(events, Items[dict]) else ():
            kind = next((kind for kind in _ENDS if kind in event), None)
            if kind is not None and not fits(event[kind], int):
                if unread is not None:
                    unread.skip_file(path, "skipped an event without its group id")
            elif "issued" in event:
                prompt = {key: event.get(key) for key in ("prompt_index", "epoch")}
                prompts[event["issued"]] = prompt
            elif fits(event, _Generated):
                prompt = prompts.get(event["generated"], {}).get("prompt_index")
                results.append((prompt, event["successes"], event["scored"]))
            elif "trained" in event:
                prompts.pop(event["trained"], None)
            elif "dropped" in event:
                group_id = event["dropped"]
                drop = {"step": record["step"], "attempt": attempt, "group_id": group_id}
                why = {key: event.get(key) for key in ("reason", "reissue")}
                receipts.drops.append({**drop, **prompts.pop(group_id, {}), **why})
    receipts.drops = [drop for drop in receipts.drops if receipts.attempts.counts(drop)]
    receipts.results = [each for each in receipts.results if receipts.attempts.counts(each)]
    return receipts


def read_metrics(path: Path, attempts: Attempts, unread: Unread | None = None) -> list[Record]:
    """Read the metrics of each step, in order, from the last attempt that trained the step."""
    records = list(read_records(path, StepRecord, unread))
    for record in records:
        if record["step"] > 0:
            attempts.steps_done.setdefault(record["attempt"], record["step"] - 1)
    counted = {record["step"]: record for record in records if attempts.counts(record)}
    if records and not counted and unread is not None:
        unread.skip_file(
            path, "all of its steps were repeated by later attempts, according to the receipts"
        )
    return [counted[step] for step in sorted(counted)]
