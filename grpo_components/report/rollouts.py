"""The groups that a report shows: chosen evenly over the run, bounded, and harmless as text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_components.report.run_files import NUMBER, Attempts, Record, fits
from grpo_components.report.shown import text
from grpo_components.report.unread import ObjectReader, Unread

MOST_GROUPS = 200
MOST_BYTES = 12 * 2**20
"""Of all lines that are shown; fewer groups where they are long."""
_LONGEST_NAME = 100
_LONGEST = 12_000
"""Characters of a prompt or a response."""
_MOST_TOKENS = 3_000
"""Of a response, where they are shown one by one."""
_HEAD = re.compile(rb'\{"step": (\d{1,15}), "attempt": (\d{1,15}), ')
_WHOSE = ("generator", "trainer", "reference")


@dataclass
class Shown:
    """What a report shows of the logged rollouts."""

    groups: list[Record]
    """Ready for the page."""
    logged: int
    """Groups of the run that are in the file."""
    superseded: int
    """Groups of steps that a later attempt has done again."""
    logprobs: set[str]
    """Whose logprobs of tokens any group has: generator, trainer, reference."""


def read_rollouts(
    path: Path,
    attempts: Attempts,
    most_groups: int = MOST_GROUPS,
    unread: Unread | None = None,
) -> Shown:
    """Choose groups of a run and read them.

    Args:
        path: of rollouts.jsonl; it may be missing.
        attempts: of the run.
        most_groups: to show.
        unread: gets what is passed over.
    """
    unread, reader = unread or Unread(path.parent), ObjectReader()
    places, superseded = _places(path, attempts, unread)
    chosen = _spread(places, most_groups)
    while len(chosen) > 1 and sum(length for _, length in chosen) > MOST_BYTES:
        chosen = _spread(chosen, len(chosen) // 2)
    groups = []
    if chosen:
        with path.open("rb") as file:
            for start, length in chosen:
                file.seek(start)
                record = reader.read(file.read(length))
                if record is not None and fits(record, _GROUP):
                    groups.append(_readable(record))
                else:
                    unread.file(path, "a group that is damaged is left out")
        if reader.too_large:
            unread.file(path, "a number that is too large is left out")
    responses = [response for group in groups for response in group["responses"]]
    known = {
        who for who in _WHOSE if any(response.get(f"{who}_logprobs") for response in responses)
    }
    damaged = len(chosen) - len(groups)
    return Shown(groups, len(places) - damaged, superseded, known)


def _places(path: Path, attempts: Attempts, unread: Unread) -> tuple[list[tuple[int, int]], int]:
    """Start and length of each whole line that counts, and the number of those that do not."""
    places: list[tuple[int, int]] = []
    superseded, reader = 0, ObjectReader()
    for number, start, line in unread.lines(path):
        head = _HEAD.match(line)  # many times faster than the whole line
        record: Record | None = reader.read(line) if head is None else None
        if head is not None:
            record = {"step": int(head[1]), "attempt": int(head[2])}
        if record is None or not fits(record, _PLACE):
            unread.line(path, number, "no group with its step and attempt")
        elif attempts.counts(record):
            places.append((start, len(line)))
        else:
            superseded += 1
    return places, superseded


def _spread(places: Sequence[tuple[int, int]], most: int) -> list[tuple[int, int]]:
    """At most so many of these, evenly, the first and the last among them."""
    if len(places) <= most:
        return list(places)
    if most < 2:
        return list(places[-most:]) if most else []
    return [places[round(i * (len(places) - 1) / (most - 1))] for i in range(most)]


def _readable(record: Record) -> Record:
    advantages = record["advantages"]
    return {
        **{key: _number(record.get(key)) for key in _NUMBERS},
        **{key: text(record.get(key, ""), _LONGEST) for key in ("prompt", "answer")},
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
        "text": text(response.get("response", ""), _LONGEST),
        "finish": text(response.get("finish_reason", ""), _LONGEST_NAME),
        "tokens": _number(response.get("response_tokens")),
        "versions": versions if isinstance(versions, list) and _is_span(versions) else None,
        "reward": _number(response.get("reward")),
        "terms": {text(k, _LONGEST_NAME): _number(v) for k, v in terms.items()}
        if isinstance(terms, dict)
        else {},
        "success": bool(response.get("success")),
        "error": None if error is None else text(error, 1000),
        "advantage": advantage,
    }
    pieces = response.get("tokens")
    if isinstance(pieces, list):
        shown["pieces"] = [text(piece, _LONGEST) for piece in pieces[:_MOST_TOKENS]]
        shown["more_tokens"] = max(0, len(pieces) - _MOST_TOKENS)
        for name in (f"{who}_logprobs" for who in _WHOSE):
            values = response.get(name)
            shown[name] = None
            if isinstance(values, list):
                shown[name] = [_number(value) for value in values[:_MOST_TOKENS]]
    elif fits(response, {"turns": [{"by": str, "text": str}]}):
        shown["turns"] = [
            {"by": text(turn["by"], _LONGEST_NAME), "text": text(turn["text"], _LONGEST)}
            for turn in response["turns"]
        ]
    return shown


def _is_span(versions: list[Any]) -> bool:
    return fits(versions, [int]) and len(versions) == 2


def _number(value: Any) -> float | None:
    return value if fits(value, NUMBER) else None


_PLACE = {"step": int, "attempt": int}
_GROUP = {"responses": [dict], "advantages": [(*NUMBER, type(None))]}
_NUMBERS = ("step", "attempt", "group_id", "prompt_index", "epoch")
