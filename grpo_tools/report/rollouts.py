"""Reads the groups that a report shows: spread evenly over the run, limited in number and size."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from grpo_components.files import Record, record_in
from grpo_tools.report.run_files import DAMAGED, Attempts
from grpo_tools.report.safe_text import text

MAX_GROUPS = 200
MAX_BYTES = 12 * 2**20
"""Maximum total size of the shown groups' lines; with long groups, fewer are shown."""
_MAX_NAME_CHARS, _MAX_TEXT_CHARS = 100, 12_000
_MAX_TOKENS = 3_000
"""Maximum number of tokens in a response that is shown token by token."""
_HEAD = re.compile(rb'\{"step": (\d+), "attempt": (\d+), .*\}\n')
"""Matches a line of a rollout log; many times faster than parsing it."""
_LOGPROB_SOURCES = ("generator", "trainer", "reference", "teacher")


@dataclass
class RolloutSample:
    """The groups that a report shows, and how many the file has."""

    groups: list[Record]
    """Parsed lines of the rollout log, one per group, with texts made safe and long ones cut."""
    logged: int
    """Number of groups in the file, without superseded ones."""
    superseded: int
    """Number of groups in the file whose step a later attempt repeated."""
    logprobs: set[str]
    """Which of generator, trainer, reference and teacher have logprobs in at least one group."""


class _Place(NamedTuple):
    """Where a line of the rollout log is: offset and length in bytes; and its attempt and step."""

    start: int
    length: int
    attempt: int
    step: int


def read_groups(
    path: Path, attempts: Attempts, limit: int = MAX_GROUPS, *, of_evaluations: bool = False
) -> RolloutSample:
    """Read up to `limit` groups of a rollout log, spread over the run.

    With `of_evaluations`, a group is the answers to one held-out prompt, and whole evaluations are
    read, so that a reader can compare answers to the same prompts.
    """
    spread = _spread_evaluations if of_evaluations else _spread
    if not path.exists():
        return RolloutSample([], 0, 0, set())
    places: list[_Place] = []
    superseded = start = 0
    with path.open("rb") as file:
        for line in file:
            if head := _HEAD.fullmatch(line):
                step, attempt = int(head[1]), int(head[2])
                counts = attempts.counts({"step": step, "attempt": attempt})
                superseded += not counts
                places += [_Place(start, len(line), attempt, step)] if counts else []
            start += len(line)
        chosen = spread(places, limit)
        while len(chosen) > 1 and sum(place.length for place in chosen) > MAX_BYTES:
            chosen = spread(chosen, len(chosen) // 2)
        groups = []
        for place in chosen:
            file.seek(place.start)
            record = record_in(file.read(place.length)) or {}
            with contextlib.suppress(*DAMAGED):
                for response in record["responses"]:
                    pieces = response.get("tokens") or ()
                    response["more_tokens"] = max(0, len(pieces) - _MAX_TOKENS)
                groups.append(_shown(record))
    responses = [response for group in groups for response in group["responses"]]
    known = {who for who in _LOGPROB_SOURCES if any(r.get(f"{who}_logprobs") for r in responses)}
    return RolloutSample(groups, len(places), superseded, known)


def _spread(places: Sequence[Any], limit: int) -> list[Any]:
    """Choose up to `limit` evenly spaced items, including both ends; if only one, the last."""
    at = np.linspace(len(places) - 1, 0, min(limit, len(places)))
    return [places[round(number)] for number in at[::-1]]


def _spread_evaluations(places: Sequence[_Place], limit: int) -> list[_Place]:
    """Choose evenly spaced whole evaluations, up to `limit` lines; thin out one that has more."""
    by_step = [[*each] for _, each in groupby(places, lambda place: (place.attempt, place.step))]
    most = max(map(len, by_step), default=1)
    evaluations = _spread(by_step, max(1, limit // most))
    return _spread([place for evaluation in evaluations for place in evaluation], limit)


def _shown(value: Any) -> Any:
    """Return a value of a line with each text made safe, and long texts and lists of tokens cut."""
    if isinstance(value, str):
        return text(value, _MAX_TEXT_CHARS)
    if isinstance(value, dict):
        return {text(key, _MAX_NAME_CHARS): _shown(item) for key, item in value.items()}
    if isinstance(value, list):
        return [*map(_shown, value[:_MAX_TOKENS])]
    return value
