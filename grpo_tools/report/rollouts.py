"""Reads the groups that a report shows: spread evenly over the run, limited in number and size."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from grpo_components.files import Record, record_in
from grpo_tools.report.run_files import Attempts
from grpo_tools.report.safe_text import text

MAX_GROUPS = 200
MAX_BYTES = 12 * 2**20
"""Maximum total size of the shown groups' lines; with long groups, fewer are shown."""
_MAX_NAME_CHARS, _MAX_ERROR_CHARS, _MAX_TEXT_CHARS = 100, 1000, 12_000
_MAX_TOKENS = 3_000
"""Maximum number of tokens in a response that is shown token by token."""
_HEAD = re.compile(rb'\{"step": (\d+), "attempt": (\d+), .*\}\n')
"""Matches a line of the file; many times faster than parsing it."""
_LOGPROB_SOURCES = ("generator", "trainer", "reference", "teacher")
_NUMBERS = ("step", "attempt", "group_id", "prompt_index", "epoch", "policy_version")


@dataclass
class RolloutSample:
    """The groups that a report shows, and how many the file has."""

    groups: list[Record]
    """The shown groups, in the form that the page's script reads."""
    logged: int
    """Number of groups in the file, without superseded ones."""
    superseded: int
    """Number of groups in the file whose step a later attempt repeated."""
    logprobs: set[str]
    """Which of generator, trainer, reference and teacher have logprobs in at least one group."""


class _Place(NamedTuple):
    """A line of the file: its offset and length in bytes, and its step."""

    start: int
    length: int
    attempt: int
    step: int


def read_groups(
    path: Path, attempts: Attempts, limit: int = MAX_GROUPS, *, of_evaluations: bool = False
) -> RolloutSample:
    """Read groups spread over the run; with `of_evaluations`, a group is one prompt's answers.

    Whole evaluations are read, so that the same prompts can be compared.
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
            if record := record_in(file.read(place.length)):
                groups.append(_readable(record))
    responses = [response for group in groups for response in group["responses"]]
    known = {who for who in _LOGPROB_SOURCES if any(r.get(f"{who}_logprobs") for r in responses)}
    return RolloutSample(groups, len(places), superseded, known)


def _spread(places: Sequence[Any], limit: int) -> list[Any]:
    """Choose up to `limit` evenly spaced places, including the first and the last."""
    if len(places) <= limit:
        return list(places)
    if limit < 2:
        return list(places[-limit:]) if limit else []
    return [places[round(i * (len(places) - 1) / (limit - 1))] for i in range(limit)]


def _spread_evaluations(places: Sequence[_Place], limit: int) -> list[_Place]:
    """Choose evenly spaced evaluations with up to `limit` places; of a larger one, some places."""
    by_step = [[*each] for _, each in groupby(places, lambda place: (place.attempt, place.step))]
    most = max(map(len, by_step), default=1)
    evaluations = _spread(by_step, max(1, limit // most))
    return _spread([place for evaluation in evaluations for place in evaluation], limit)


def _readable(record: Record) -> Record:
    responses = record["responses"]
    advantages = record.get("advantages", [None] * len(responses))
    return {
        **{key: record.get(key) for key in _NUMBERS},
        **{key: text(record[key], _MAX_TEXT_CHARS) for key in ("prompt", "answer")},
        "responses": [*map(_response, responses, advantages)],
    }


def _response(response: Record, advantage: float | None) -> Record:
    terms, error = response["reward_terms"] or {}, response["error"]
    shown: Record = {
        "text": text(response["response"], _MAX_TEXT_CHARS),
        "finish": text(response["finish_reason"], _MAX_NAME_CHARS),
        "tokens": response["response_tokens"],
        "versions": response["versions"],
        "reward": response["reward"],
        "terms": {text(name, _MAX_NAME_CHARS): value for name, value in terms.items()},
        "success": response["success"],
        "error": None if error is None else text(error, _MAX_ERROR_CHARS),
        "advantage": advantage,
    }
    if pieces := response.get("tokens"):
        shown["pieces"] = [text(piece, _MAX_TEXT_CHARS) for piece in pieces[:_MAX_TOKENS]]
        shown["more_tokens"] = max(0, len(pieces) - _MAX_TOKENS)
        for name in (f"{who}_logprobs" for who in _LOGPROB_SOURCES):
            values: list[Any] | None = response.get(name)
            shown[name] = values and values[:_MAX_TOKENS]
    elif turns := response.get("turns"):
        shown["turns"] = [
            {"by": turn["by"], "text": text(turn["text"], _MAX_TEXT_CHARS)} for turn in turns
        ]
    return shown
