"""Which rows of a data source are used: declared filters, and the parts of a partition."""

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
    """Conditions on columns; a row that meets all of them is used.

    Args:
        filters: by column of the source: `allowed`, a list of values; `min` and `max`, bounds of a
            number, themselves allowed; `regex`, an expression that is found in the text.

    Raises:
        ValueError: naming the filter that is none.
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
        """Whether a row is used.

        Raises:
            ValueError: naming the row, if it lacks a column, or holds no number where it is bounded
                or no text where one is searched. A null meets only an `allowed` that lists it.
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
            raise ValueError(f"{key}: {wanted!r} is no regular expression: {error}") from None
        return lambda row, column: _is_found(row, column, pattern)
    if name in _CONDITIONS:
        kinds = {"allowed": "a list of values", "regex": "a text"}
        raise ValueError(f"{key}: {wanted!r} given; allowed: {kinds.get(name, 'a number')}")
    raise ValueError(f"{key}: unknown condition; allowed: {_listed(_CONDITIONS)}")


def _is_at_least(row: Row, column: str, sign: int, bound: float) -> bool:
    value = row.value(column)
    if value is None:
        return False
    try:
        number = float(value)  # a CSV file has texts only
    except (TypeError, ValueError):
        row.refuse(column, f"{value!r} is no number, and filters bound it")
    return sign * number >= bound


def _is_found(row: Row, column: str, pattern: re.Pattern[str]) -> bool:
    value = row.value(column)
    if not isinstance(value, str | None):
        row.refuse(column, f"{value!r} is no text, and filters search it")
    return value is not None and pattern.search(value) is not None


class Partition:
    """Some of n parts that the rows of a source fall into, each question wholly into one.

    The part is a hash of the question: it depends on no order, no seed and no other row, and a
    question that stands in a source twice is never on both sides.

    Args:
        text: `1-9/10` for the parts 1 to 9 of 10, `10/10` for the last alone.

    Raises:
        ValueError: if it reads otherwise.
    """

    def __init__(self, text: str) -> None:
        match = _PARTITION.fullmatch(str(text))
        first, last, self._parts = (int(x or 0) for x in match.groups()) if match else (0, 0, 0)
        last = last or first
        if not 1 <= first <= last <= self._parts:
            allowed = "parts of all parts, from 1, such as 1-9/10 and 10/10"
            raise ValueError(f"dataset.partition: {text!r} given; allowed: {allowed}")
        self._used = range(first, last + 1)

    def __call__(self, question: str) -> bool:
        """Whether a question is in the parts."""
        digest = hashlib.sha256(question.encode()).digest()
        return int.from_bytes(digest[:8], "big") % self._parts + 1 in self._used
