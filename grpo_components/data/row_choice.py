"""Selects rows of a data source by filters and by the parts of a partition."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from grpo_components.data.rows import Row

_CONDITIONS = ("allowed", "min", "max", "regex")
_PARTITION = re.compile(r"(\d+)(?:-(\d+))?/(\d+)")


class RowFilters:
    """Keeps the rows that meet all conditions on their columns.

    Args:
        filters: conditions by column of the source: `allowed`, a list of values; `min` and `max`,
            inclusive bounds of a number; `regex`, a regular expression to search for in a text.

    Raises:
        ValueError: a filter is malformed; the message names its key.
    """

    def __init__(self, filters: Mapping[str, Mapping[str, Any]]) -> None:
        self._checks: list[tuple[str, Callable[[Row, str], bool]]] = []
        if not isinstance(filters, Mapping):
            raise ValueError(f"dataset.filters: {filters!r} given; allowed: conditions by column")
        for column, conditions in filters.items():
            key = f"dataset.filters.{column}"
            if not isinstance(conditions, Mapping) or not conditions:
                raise ValueError(f"{key}: {conditions} given; allowed: {_listed(_CONDITIONS)}")
            for name, wanted in conditions.items():
                check = _condition(f"{key}.{name}", name, wanted)
                self._checks.append((column, check))

    def __call__(self, row: Row) -> bool:
        """Whether to use a row. A null meets only an `allowed` that lists null.

        Raises:
            ValueError: the row lacks a column, or its value is not a number (for `min` and `max`)
                or not a text (for `regex`). The message names the row.
        """
        return all(check(row, column) for column, check in self._checks)


def _listed(names: tuple[str, ...]) -> str:
    return f"one or more of {', '.join(names)}"


def _condition(key: str, name: str, wanted: Any) -> Callable[[Row, str], bool]:
    if name == "allowed" and isinstance(wanted, list) and wanted:
        return lambda row, column: row.value(column) in wanted
    if (
        name in ("min", "max")
        and isinstance(wanted, int | float)
        and not (isinstance(wanted, bool) or math.isnan(wanted))
    ):
        sign = 1 if name == "min" else -1
        return lambda row, column: _is_at_least(row, column, sign, sign * wanted)
    if name == "regex" and isinstance(wanted, str):
        try:
            pattern = re.compile(wanted)
        except re.error as error:
            problem = f"{wanted!r} given: {error}"
            raise ValueError(f"{key}: {problem}; allowed: a regular expression") from None
        return lambda row, column: _matches(row, column, pattern)
    if name in _CONDITIONS:
        kinds = {"allowed": "a list of values", "regex": "a text"}
        raise ValueError(f"{key}: {wanted!r} given; allowed: {kinds.get(name, 'a number')}")
    raise ValueError(f"{key}: unknown condition; allowed: {_listed(_CONDITIONS)}")


def _is_at_least(row: Row, column: str, sign: int, bound: float) -> bool:
    value = row.value(column)
    if value is None:
        return False
    try:
        number = float(value)  # a CSV file has only texts
    except (TypeError, ValueError):
        row.refuse(column, f"{value!r} is not a number, but a filter has min or max")
    return sign * number >= bound


def _matches(row: Row, column: str, pattern: re.Pattern[str]) -> bool:
    value = row.value(column)
    if not isinstance(value, str | None):
        row.refuse(column, f"{value!r} is not a text, but a filter has a regex")
    return value is not None and pattern.search(value) is not None


class Partition:
    """Keeps the rows in some of n parts, for example to split off validation data.

    A hash of the question decides the part of its row. So the part depends on no seed, on no other
    row and not on the order of rows, and equal questions are always in the same part.

    Args:
        text: `1-9/10` for parts 1 to 9 of 10, `10/10` for the last part only.

    Raises:
        ValueError: the text has another form, or its numbers are out of range.
    """

    def __init__(self, text: str) -> None:
        match = _PARTITION.fullmatch(str(text))
        first, last, self._parts = (int(x or 0) for x in match.groups()) if match else (0, 0, 0)
        last = last or first
        if not 1 <= first <= last <= self._parts:
            allowed = "parts of n, counted from 1, such as 1-9/10 or 10/10"
            raise ValueError(f"dataset.partition: {text!r} given; allowed: {allowed}")
        self._used = range(first, last + 1)

    def __call__(self, question: str) -> bool:
        """Whether a question is in one of the parts."""
        digest = hashlib.sha256(question.encode()).digest()
        return int.from_bytes(digest[:8], "big") % self._parts + 1 in self._used
