"""Selects rows of a data source by filters and by the parts of a partition."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
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
from grpo_components.shapes import described_as, read_as

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
    regex: Annotated[re.Pattern[str], described_as("a regular expression")]


_OneOrMore = Annotated[
    _Conditions, Field(min_length=1), described_as("one or more of allowed, min, max, regex")
]
_FILTERS = TypeAdapter(Annotated[Mapping[Any, _OneOrMore], described_as("conditions by column")])


class RowFilters:
    """Keeps rows by conditions on columns: `allowed` (a list of values), `min`, `max`, `regex`."""

    def __init__(self, filters: Mapping[str, Mapping[str, Any]]) -> None:
        self._filters = read_as(_FILTERS, filters, "dataset.filters")
        self.ranges: dict[str, tuple[float, float]] = {}
        """Smallest and largest number seen in each column that has a `min` or `max` condition."""

    def __call__(self, row: Row) -> bool:
        """Whether a row meets all conditions. A null meets only an `allowed` that lists null."""
        return all(
            self._meets(row, column, name, wanted)
            for column, conditions in self._filters.items()
            for name, wanted in conditions.items()
        )

    def _meets(self, row: Row, column: str, name: str, wanted: Any) -> bool:
        try:
            value = row.value(column)
        except ValueError as error:  # the row has no such column
            raise ValueError(f"dataset.filters.{column}: {error}") from None
        if name == "allowed" or value is None:
            return name == "allowed" and value in wanted
        if name == "regex":
            if not isinstance(value, str):
                row.refuse(column, f"{value!r} is not a text, but a filter has a regex")
            return wanted.search(value) is not None
        try:
            number = float(value)  # a CSV file has only texts
        except (TypeError, ValueError):
            row.refuse(column, f"{value!r} is not a number, but a filter has min or max")
        low, high = self.ranges.get(column, (number, number))
        self.ranges[column] = min(low, number), max(high, number)
        return number >= wanted if name == "min" else number <= wanted


class Partition:
    """Selects the rows in some of n parts: `1-9/10` to train on, for example, `10/10` to validate.

    A hash of the question decides the part of its row. So the part depends on no seed, no other row
    and no order of rows, and equal questions are always in the same part.
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
        """Whether a question is in one of the selected parts."""
        digest = hashlib.sha256(question.encode()).digest()
        return int.from_bytes(digest[:8], "big") % self._parts + 1 in self._used
