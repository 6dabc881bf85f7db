"""Selects rows of a data source by filters and by the parts of a partition."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    InstanceOf,
    Strict,
    StrictInt,
    TypeAdapter,
    with_config,
)
from typing_extensions import TypedDict

from grpo_components.data.rows import Row
from grpo_components.errors import ConfigError
from grpo_components.shapes import AnyText, described_as, read_as

_PARTITION = re.compile(r"(\d+)(?:-(\d+))?/(\d+)")
_Bound = Annotated[
    StrictInt | InstanceOf[float],  # pydantic's float takes NumPy's whole numbers, too
    AfterValidator(float),
    Field(ge=-math.inf),  # refuses NaN
    described_as("a number"),
]


@with_config(ConfigDict(extra="forbid"))
class _Conditions(TypedDict, total=False):
    allowed: Annotated[list[Any], Strict(), Field(min_length=1), described_as("a list of values")]
    min: _Bound
    max: _Bound
    regex: Annotated[AnyText, described_as("a text")]


_OneOrMore = Annotated[
    _Conditions, Field(min_length=1), described_as("one or more of allowed, min, max, regex")
]
_FILTERS = TypeAdapter(Annotated[Mapping[Any, _OneOrMore], described_as("conditions by column")])


class RowFilters:
    """Keeps the rows that meet all conditions on their columns."""

    def __init__(self, filters: Mapping[str, Mapping[str, Any]]) -> None:
        self._checks: list[tuple[str, Callable[[Row, str], bool]]] = []
        read_as(_FILTERS, filters, "dataset.filters")
        for column, conditions in filters.items():
            for name, wanted in conditions.items():
                check = _condition(f"dataset.filters.{column}.{name}", name, wanted)
                self._checks.append((column, check))

    def __call__(self, row: Row) -> bool:
        """Whether to use a row. A null meets only an `allowed` that lists null."""
        return all(check(row, column) for column, check in self._checks)


def _condition(key: str, name: str, wanted: Any) -> Callable[[Row, str], bool]:
    if name == "allowed":
        return lambda row, column: row.value(column) in wanted
    if name == "regex":
        try:
            pattern = re.compile(wanted)
        except re.error as error:
            problem = f"{wanted!r} given: {error}"
            raise ConfigError(key, problem, "a regular expression") from None
        return lambda row, column: _matches(row, column, pattern)
    sign = 1 if name == "min" else -1
    return lambda row, column: _is_at_least(row, column, sign, sign * wanted)


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
    """

    def __init__(self, text: str) -> None:
        match = _PARTITION.fullmatch(str(text))
        first, last, self._parts = (int(x or 0) for x in match.groups()) if match else (0, 0, 0)
        last = last or first
        if not 1 <= first <= last <= self._parts:
            allowed = "parts of n, counted from 1, such as 1-9/10 or 10/10"
            raise ConfigError("dataset.partition", f"{text!r} given", allowed)
        self._used = range(first, last + 1)

    def __call__(self, question: str) -> bool:
        """Whether a question is in one of the parts."""
        digest = hashlib.sha256(question.encode()).digest()
        return int.from_bytes(digest[:8], "big") % self._parts + 1 in self._used
