"""Reads the groups that a report shows: spread evenly over the run, limited in number and size."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field
from typing_extensions import TypedDict

from grpo_components.shapes import fits
from grpo_tools.report.run_files import Attempts, Items, Number, Record, StepRecord
from grpo_tools.report.safe_text import text
from grpo_tools.report.unread import ObjectReader, Unread

_T = TypeVar("_T")
MAX_GROUPS = 200
MAX_BYTES = 12 * 2**20
"""Maximum total size of the shown groups' lines; with long groups, fewer are shown."""
_MAX_NAME_CHARS = 100
_MAX_TEXT_CHARS = 12_000
"""Maximum length of a shown prompt or response."""
_MAX_TOKENS = 3_000
"""Maximum number of tokens in a response that is shown token by token."""
_HEAD = re.compile(rb'\{"step": (\d{1,15}), "attempt": (\d{1,15}), ')
_LOGPROB_SOURCES = ("generator", "trainer", "reference", "teacher")
_NUMBERS = ("step", "attempt", "group_id", "prompt_index", "epoch", "policy_version")
_Span = Annotated[Items[int], Field(min_length=2, max_length=2)]


class _Group(TypedDict):
    responses: Items[dict]
    advantages: Items[Number | None]


class _Answers(TypedDict):
    responses: Items[dict]


class _Turn(TypedDict):
    by: str
    text: str


@dataclass
class RolloutSample:
    """The groups that a report shows, and how many the file has."""

    groups: list[Record]
    """The shown groups, in the form that the page's script reads."""
    logged: int
    """Number of groups in the file, without superseded and damaged ones."""
    superseded: int
    """Number of groups in the file whose step a later attempt repeated."""
    logprobs: set[str]
    """Those of generator, trainer, reference and teacher with logprobs in at least one group."""


@dataclass(frozen=True)
class _Place:
    """A line of the file."""

    start: int
    """Offset in bytes."""
    length: int
    """Length in bytes."""
    step: tuple[int, int]
    """Attempt and step."""


def read_rollouts(
    path: Path,
    attempts: Attempts,
    max_groups: int = MAX_GROUPS,
    unread: Unread | None = None,
) -> RolloutSample:
    """Choose groups spread over the run and read them."""
    return _read(path, attempts, unread or Unread(path.parent), _Group, max_groups, _spread)


def read_answers(
    path: Path,
    attempts: Attempts,
    max_prompts: int = MAX_GROUPS,
    unread: Unread | None = None,
) -> RolloutSample:
    """Choose evaluations spread over the run and read their answers; a group is a prompt's answers.

    Whole evaluations are chosen, so that the same prompts can be compared.
    """
    unread = unread or Unread(path.parent)
    return _read(path, attempts, unread, _Answers, max_prompts, _spread_evaluations)


def _read(
    path: Path,
    attempts: Attempts,
    unread: Unread,
    shape: Any,
    limit: int,
    spread: Callable[[Sequence[_Place], int], list[_Place]],
) -> RolloutSample:
    reader = ObjectReader()
    places, superseded = _places(path, attempts, unread)
    chosen = spread(places, limit)
    while len(chosen) > 1 and sum(place.length for place in chosen) > MAX_BYTES:
        chosen = spread(chosen, len(chosen) // 2)
    groups = []
    if chosen:
        with path.open("rb") as file:
            for place in chosen:
                file.seek(place.start)
                record = reader.read(file.read(place.length))
                if record is not None and fits(record, shape):
                    groups.append(_readable(record))
                else:
                    unread.skip_file(path, "skipped a damaged group")
        if reader.too_large:
            unread.skip_file(path, "skipped a number that is too large")
    responses = [response for group in groups for response in group["responses"]]
    known = {
        who
        for who in _LOGPROB_SOURCES
        if any(response.get(f"{who}_logprobs") for response in responses)
    }
    damaged = len(chosen) - len(groups)
    return RolloutSample(groups, len(places) - damaged, superseded, known)


def _places(path: Path, attempts: Attempts, unread: Unread) -> tuple[list[_Place], int]:
    """Return the place of each line that counts, and the number of superseded lines."""
    places: list[_Place] = []
    superseded, reader = 0, ObjectReader()
    for number, start, line in unread.lines(path):
        head = _HEAD.match(line)  # many times faster than parsing the line
        record: Record | None = reader.read(line) if head is None else None
        if head is not None:
            record = {"step": int(head[1]), "attempt": int(head[2])}
        if record is None or not fits(record, StepRecord):
            unread.skip_line(path, number, "not a group with step and attempt")
        elif attempts.counts(record):
            places.append(_Place(start, len(line), (record["attempt"], record["step"])))
        else:
            superseded += 1
    return places, superseded


def _spread(places: Sequence[_T], limit: int) -> list[_T]:
    """Choose up to `limit` evenly spaced places, including the first and the last."""
    if len(places) <= limit:
        return list(places)
    if limit < 2:
        return list(places[-limit:]) if limit else []
    return [places[round(i * (len(places) - 1) / (limit - 1))] for i in range(limit)]


def _spread_evaluations(places: Sequence[_Place], limit: int) -> list[_Place]:
    """Choose evenly spaced evaluations with up to `limit` places; of a single one, some places."""
    by_step: defaultdict[tuple[int, int], list[_Place]] = defaultdict(list)
    for place in places:
        by_step[place.step].append(place)
    evaluations = [*by_step.values()]
    while len(evaluations) > 1 and sum(map(len, evaluations)) > limit:
        evaluations = _spread(evaluations, len(evaluations) - 1 - len(evaluations) // 8)
    return _spread([place for evaluation in evaluations for place in evaluation], limit)


def _readable(record: Record) -> Record:
    advantages = record.get("advantages", ())
    return {
        **{key: _number(record.get(key)) for key in _NUMBERS},
        **{key: text(record.get(key, ""), _MAX_TEXT_CHARS) for key in ("prompt", "answer")},
        "responses": [
            _response(response, advantages[i] if i < len(advantages) else None)
            for i, response in enumerate(record["responses"])
        ],
    }


def _response(response: Mapping[str, Any], advantage: float | None) -> Record:
    terms = response.get("reward_terms")
    error = response.get("error")
    versions = response.get("versions")
    shown: Record = {
        "text": text(response.get("response", ""), _MAX_TEXT_CHARS),
        "finish": text(response.get("finish_reason", ""), _MAX_NAME_CHARS),
        "tokens": _number(response.get("response_tokens")),
        "versions": versions if fits(versions, _Span) else None,
        "reward": _number(response.get("reward")),
        "terms": {text(k, _MAX_NAME_CHARS): _number(v) for k, v in terms.items()}
        if isinstance(terms, dict)
        else {},
        "success": bool(response.get("success")),
        "error": None if error is None else text(error, 1000),
        "advantage": advantage,
    }
    pieces = response.get("tokens")
    if isinstance(pieces, list):
        shown["pieces"] = [text(piece, _MAX_TEXT_CHARS) for piece in pieces[:_MAX_TOKENS]]
        shown["more_tokens"] = max(0, len(pieces) - _MAX_TOKENS)
        for name in (f"{who}_logprobs" for who in _LOGPROB_SOURCES):
            values = response.get(name)
            shown[name] = None
            if isinstance(values, list):
                shown[name] = [_number(value) for value in values[:_MAX_TOKENS]]
    elif fits(response.get("turns"), Items[_Turn]):
        shown["turns"] = [
            {"by": text(turn["by"], _MAX_NAME_CHARS), "text": text(turn["text"], _MAX_TEXT_CHARS)}
            for turn in response["turns"]
        ]
    return shown


def _number(value: Any) -> float | None:
    return value if fits(value, Number) else None
