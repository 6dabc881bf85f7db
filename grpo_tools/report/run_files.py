"""Reads what happened in a run, which may have several attempts."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from grpo_components.files import FAILURES, Record, records_of

DAMAGED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
"""Errors from reading a line of a file that is damaged or that another program wrote."""
_NUMBERS = ("attempt", "step", "steps_done", "num_steps")
"""Fields of events that are whole numbers."""


class NoStepsError(FileNotFoundError):
    """The run has not logged a step or an evaluation yet."""


@dataclass
class Attempts:
    """Decides which records count: those of steps that no later attempt replaced.

    An attempt begins with a start, a resume or a rollback. Once it has trained a step, it
    replaces all steps after the one at which it began.
    """

    steps_done: dict[int, int] = field(default_factory=dict)
    """Attempt -> number of steps done when it began; only attempts that trained a step."""

    def counts(self, record: Mapping[str, Any]) -> bool:
        """Return whether a record counts: no later attempt replaced its step."""
        attempt, step = record["attempt"], record["step"]
        return all(step <= done for later, done in self.steps_done.items() if later > attempt)


@dataclass
class History:
    """What a report or a diagnosis reads of a run: events (receipts.jsonl), failures, metrics."""

    folder: Path
    """Output folder of the run."""
    metrics: list[Record] = field(default_factory=list)
    """Metrics of each step, in order, from the last attempt that trained the step."""
    attempts: Attempts = field(default_factory=Attempts)
    starts: list[Record] = field(default_factory=list)
    """Start record of each attempt."""
    ends: dict[int, Record] = field(default_factory=dict)
    """End record of each attempt that wrote one."""
    failures: dict[int, str | None] = field(default_factory=dict)
    """Attempt -> error that ended it, or None if a person stopped it."""
    last_steps: dict[int, int] = field(default_factory=dict)
    """Last step of each attempt that trained a step or wrote an end record."""
    drops: list[Record] = field(default_factory=list)
    """Dropped groups with step, attempt, group_id, prompt_index, epoch, reason and reissue."""
    results: list[Record] = field(default_factory=list)
    """With a curriculum: generated groups with step, attempt, prompt_index, successes, scored."""
    lengths: dict[int, tuple[float, int]] = field(default_factory=dict)
    """Generated group -> its mean tokens per response, and its number of responses."""
    step: int = 0
    """Number of the last training step in receipts.jsonl."""


def read_history(folder: Path) -> History:
    """Read a run's receipts, failures and metrics; a damaged line is skipped."""
    if not folder.is_dir():
        what = "a file, not a folder" if folder.exists() else "no such folder"
        raise NotADirectoryError(f"{folder}: {what}")
    history, prompts = History(folder), dict[int, Record]()
    for event in records_of(folder / "receipts.jsonl"):
        if all(type(event.get(key, 0)) is int for key in _NUMBERS):
            with contextlib.suppress(*DAMAGED):
                _follow(history, prompts, event)
    for found in (history.drops, history.results):
        found[:] = filter(history.attempts.counts, found)
    for record in records_of(folder / "logs" / FAILURES, b'"error"'):
        attempt, error = record.get("attempt", 0), record.get("error", ...)
        if type(attempt) is int and (error is None or isinstance(error, str)):
            history.failures[attempt] = error
    history.metrics = read_metrics(folder / "logs" / "metrics.jsonl", history.attempts)
    return history


def read_run(folder: Path) -> History:
    """Read a run as `read_history` does; raise a NoStepsError if it has no metrics."""
    history = read_history(folder)
    if not history.metrics:
        raise NoStepsError(f"no step is logged in {folder / 'logs/metrics.jsonl'}")
    return history


def read_config(folder: Path) -> Any:
    """Read a run's last config; None if there is none. A damaged one raises a ValueError."""
    path = folder / "config.yaml"
    try:
        return yaml.safe_load(path.read_text("utf-8")) if path.exists() else None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error


def _follow(history: History, prompts: dict[int, Record], event: Record) -> None:
    name, attempt, at = event["event"], event["attempt"], history.step
    place = {"step": at + 1, "attempt": attempt}
    if name == "start":
        history.step = event["steps_done"]
        history.starts.append(event)
    elif name == "end":
        history.ends[attempt], history.last_steps[attempt] = event, event["step"]
    elif name == "step":
        history.step = history.last_steps[attempt] = event["step"]
        history.attempts.steps_done.setdefault(attempt, history.starts[-1]["steps_done"])
    elif name == "issue":
        prompts[event["group"]] = {"prompt_index": event["prompt"], "epoch": event["epoch"]}
    elif name == "finish":
        if tokens := event.get("response_tokens"):
            history.lengths[event["group"]] = sum(tokens) / len(tokens), len(tokens)
        if event.get("scored") is not None:
            result = {key: event[key] for key in ("successes", "scored")}
            history.results.append({**place, "prompt_index": event["prompt"], **result})
    elif name == "drop":
        why = {"reason": str(event["reason"]), "reissue": event["reissue"]}
        for group in event["groups"]:
            history.drops.append({**place, "group_id": group, **prompts.get(group, {}), **why})


def read_metrics(path: Path, attempts: Attempts) -> list[Record]:
    """Read the metrics of each step, in order, from the last attempt that trained the step.

    Adds to `attempts` the attempts that receipts.jsonl lacks. Skips records whose step or
    attempt is no integer.
    """
    found = ({"attempt": 0, **record} for record in records_of(path, b'"step"'))
    records = [each for each in found if {type(each["step"]), type(each["attempt"])} == {int}]
    for record in records:
        if record["step"] > 0:
            attempts.steps_done.setdefault(record["attempt"], record["step"] - 1)
    counted = {record["step"]: record for record in records if attempts.counts(record)}
    return [counted[step] for step in sorted(counted)]
