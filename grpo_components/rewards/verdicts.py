"""Reads the grade in a judge's reply: a number in its last line, or a field of a JSON object."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_components.errors import fail, shown

_FORMATS = ("number", "json")
_KEYS = ("format", "key", "scale")
_SCALE = (0.0, 10.0)
_MAX_CHARS = 20_000
"""Characters at the end of a reply in which its grade is looked for."""
# A line that is a number: `7`, `Score: 7`, `**Score:** 7/10`.
_NUMBER_LINE = re.compile(r"(?:.*[:=])?[\s*]*([-+]?\d+(?:\.\d+)?)\s*(?:/\s*\d+)?[\s*.]*")
_OBJECT = re.compile(r"\{\s*[\"}]")


@dataclass(frozen=True)
class VerdictFormat:
    """Where a judge's reply has its grade, and from which to which number grades go."""

    format: str
    """`number`: the last line, as in `Score: 7`. `json`: a field of the last JSON object."""
    key: str
    """Name of that field."""
    lowest: float
    highest: float

    def read(self, reply: str) -> float | None:
        """Return the grade in a reply, from 0 at the lowest to 1 at the highest, if any."""
        tail = reply[-_MAX_CHARS:]
        grade = _last_line(tail) if self.format == "number" else _last_object(tail, self.key)
        if grade is None or not self.lowest <= grade <= self.highest:  # refuses NaN, too
            return None
        return (grade - self.lowest) / (self.highest - self.lowest)


def verdict_format(given: Mapping[str, Any]) -> VerdictFormat:
    """Read the `verdict` argument of a judge."""
    for name in given:
        if name not in _KEYS:
            fail(f"verdict.{name}", "unknown key", ", ".join(_KEYS))
    chosen, key = given.get("format", _FORMATS[0]), given.get("key", "score")
    if chosen not in _FORMATS:
        fail("verdict.format", f"{shown(chosen)} given", ", ".join(_FORMATS))
    if not (isinstance(key, str) and key):
        fail("verdict.key", f"{shown(key)} given", "the name of a field, such as score")
    scale = given.get("scale", _SCALE)
    is_pair = isinstance(scale, list | tuple) and len(scale) == 2
    if not (is_pair and all(_is_number(end) for end in scale) and scale[0] < scale[1]):
        fail("verdict.scale", f"{shown(scale)} given", "the lowest and the highest grade: [0, 10]")
    return VerdictFormat(chosen, key, float(scale[0]), float(scale[1]))


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value)


def _last_line(text: str) -> float | None:
    lines = [line for line in text.splitlines() if line.strip()]
    match = _NUMBER_LINE.fullmatch(lines[-1]) if lines else None
    return float(match[1]) if match else None


def _last_object(text: str, key: str) -> float | None:
    """Return the number under `key` in the last outermost JSON object; None without one."""
    grade, start = None, _OBJECT.search(text)
    while start:
        try:
            value, end = json.JSONDecoder().raw_decode(text, start.start())
        except RecursionError:
            return None
        except ValueError:  # a brace of the text
            end = start.end()
        else:
            grade = value.get(key)
        start = _OBJECT.search(text, end)
    return float(grade) if grade is not None and _is_number(grade) else None
