"""What a run has written down, read back while it runs, after it was killed, and over attempts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def read_records(path: Path) -> Iterator[Record]:
    """The JSON objects of a file of lines; nothing if there is no file.

    A line that is no JSON object is passed over: the last one of a run that is being written, or
    that was killed, may be torn.

    Args:
        path: of the file.
    """
    if not path.is_file():
        return
    with path.open("rb") as lines:
        for line in lines:
            record = parse(line)
            if record is not None:
                yield record


def parse(line: bytes) -> Record | None:
    """One line as a JSON object; None where it is torn."""
    try:
        record = json.loads(line)
    except (UnicodeDecodeError, json.JSONDecodeError):
        return None
    return record if isinstance(record, dict) else None


@dataclass
class Attempts:
    """Which records count: a later attempt that has done a step replaces those from there on."""

    steps_done: dict[int, int] = field(default_factory=dict)
    """Of each attempt that has done a step, the steps that were done when it began."""

    def counts(self, record: Mapping[str, Any]) -> bool:
        """Whether no later attempt has gone back behind this record's step.

        Args:
            record: with `step` and `attempt`.
        """
        step, attempt = record.get("step", 0), record.get("attempt", 0)
        return all(step <= done for later, done in self.steps_done.items() if later > attempt)


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
    drops: list[Record] = field(default_factory=list)
    """Groups that were dropped: step, attempt, group_id, prompt_index, epoch, reason, reissue."""


def read_receipts(path: Path) -> Receipts:
    """Read a run's receipts.

    Args:
        path: of receipts.jsonl; it may be missing.
    """
    receipts = Receipts()
    prompts: dict[int, Record] = {}
    for record in read_records(path):
        attempt = record.get("attempt", 0)
        if record.get("record") == "start":
            receipts.starts.append(record)
            continue
        if record.get("record") == "end":
            receipts.ends[attempt] = record
        elif receipts.starts:
            done = receipts.starts[-1].get("steps_done", 0)
            receipts.attempts.steps_done.setdefault(attempt, done)
        receipts.last_steps[attempt] = record.get("step", 0)
        for event in record.get("events", ()):
            if "issued" in event:
                prompt = {key: event.get(key) for key in ("prompt_index", "epoch")}
                prompts[event["issued"]] = prompt
            elif "trained" in event:
                prompts.pop(event["trained"], None)
            elif "dropped" in event:
                group_id = event["dropped"]
                drop = {"step": record.get("step", 0), "attempt": attempt, "group_id": group_id}
                why = {key: event.get(key) for key in ("reason", "reissue")}
                receipts.drops.append({**drop, **prompts.pop(group_id, {}), **why})
    receipts.drops = [drop for drop in receipts.drops if receipts.attempts.counts(drop)]
    return receipts


def read_metrics(path: Path, attempts: Attempts) -> list[Record]:
    """The metrics of each step, of the last attempt that did it, in the order of steps.

    Args:
        path: of metrics.jsonl; it may be missing.
        attempts: of the run; attempts that only the metrics know of are added.
    """
    records = [record for record in read_records(path) if isinstance(record.get("step"), int)]
    for record in records:
        if record["step"] > 0:
            attempts.steps_done.setdefault(record.get("attempt", 0), record["step"] - 1)
    counted = {record["step"]: record for record in records if attempts.counts(record)}
    return [counted[step] for step in sorted(counted)]
