"""Reads rows from a file or a Hugging Face data set; errors name the file, row and field."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, NoReturn

import datasets
import pyarrow
import pyarrow.parquet
from datasets.exceptions import DatasetsError
from pydantic import Field
from typing_extensions import TypedDict

from grpo_components.errors import shown
from grpo_components.shapes import AnyText, fits

Question = str | list[dict[str, Any]]
"""A text, or a chat: messages with `role` and `content`, the last one a user's."""
_NO_COLUMN: Any = object()


class _Message(TypedDict):
    role: Literal["system", "user", "assistant"]
    content: AnyText


_Chat = Annotated[list[_Message], Field(min_length=1)]


def is_question(value: Any) -> bool:
    """Whether a value is a text or a chat."""
    return isinstance(value, str) or (fits(value, _Chat) and value[-1]["role"] == "user")


class Row:
    """One row of a data source, with typed access to its fields."""

    def __init__(self, values: Any, where: str, columns: Mapping[str, str] | None) -> None:
        self._values, self._where, self._columns = values, where, columns or {}
        self._is_renamed = columns is not None
        self.asked: set[str] = set()
        """Fields that `value` or `has` was called for, to find mistyped fields in `columns`."""

    def value(self, field: str) -> Any:
        """Return the value of a field as the source has it; a CSV file has only texts."""
        self.asked.add(field)
        column = self._columns.get(field, field)
        if not isinstance(self._values, dict):
            problem = f"has no field {column}, it is {shown(self._values)}"
            allowed = f"an object with fields; {_LAYOUTS['.jsonl']}"
            raise ValueError(f"{self._where}: {problem}; allowed: {allowed}")
        found = _at(self._values, column)
        if found is _NO_COLUMN:
            has = ", ".join(map(str, self._values)) or "nothing"
            swapped = [name for name, other in self._columns.items() if other == field]
            if swapped and column == field:
                has = f"`columns` is field: column; did you mean {{{field}: {swapped[0]}}}?"
            elif self._is_renamed:
                has = f"dataset.columns.{field}=<name>, with a name out of: {has}"
            elif near := get_close_matches(column, map(str, self._values), n=1):
                has = f"did you mean {near[0]}?"
            raise ValueError(f"{self._where}: has no field {column}; allowed: {has}")
        return found

    def has(self, field: str) -> bool:
        """Whether the row has a column named like the field, or `columns` names one for it."""
        self.asked.add(field)
        is_there = isinstance(self._values, dict) and field in self._values
        return is_there or field in self._columns

    def text(self, field: str) -> str:
        """Return the value of a text field."""
        value = self.value(field)
        if not isinstance(value, str) or not value.strip():
            self.refuse(field, "must be a text that is not empty")
        self._check_unicode(field, value)
        return value

    def _check_unicode(self, field: str, text: str) -> None:
        try:
            text.encode()  # JSON allows half a surrogate pair, tokenizers do not
        except UnicodeEncodeError as error:
            self.refuse(field, f"is no Unicode text: {error}")

    def question(self, field: str) -> Question:
        """Return a field that holds a question: a text, or a chat that the policy continues.

        Messages keep entries that are not role and content, unless they are null.
        """
        value = self.value(field)
        if not isinstance(value, list):
            return self.text(field)
        if not fits(value, _Chat):
            what = "messages, each with a role (system | user | assistant) and a text as content"
            self.refuse(field, f"must be a text, or a list of {what}")
        for message in value:
            self._check_unicode(field, message["content"])
        if (role := value[-1]["role"]) != "user":
            self.refuse(field, f"ends with a message of {role}; it must end with one of user")
        if not value[-1]["content"].strip():
            self.refuse(field, "ends with an empty message")
        # A Parquet table fills missing entries with null.
        return [{k: v for k, v in message.items() if v is not None} for message in value]

    def text_or_number(self, field: str) -> str:
        """Return the value of a field that holds a text or a number, as text; 42.0 becomes `42`."""
        value = self.value(field)
        if isinstance(value, float) and math.isfinite(value):
            return str(int(value)) if value.is_integer() else str(value)
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        if not isinstance(value, str):
            allowed = "a text that is not empty, or a finite number"
            self.refuse(field, f"{value!r:.40} given; allowed: {allowed}")
        return self.text(field)

    def parsed(self, field: str) -> Any:
        """Return the data of a field; parse it if the field holds JSON text."""
        value = self.value(field)
        if not isinstance(value, str):
            return value
        try:
            return json.loads(value)
        except (ValueError, RecursionError) as error:
            self.refuse(field, f"is no JSON: {error}")

    def refuse(self, field: str, problem: str) -> NoReturn:
        """Raise a ValueError that names the row and the field."""
        raise ValueError(f"{self._where}, field {self._columns.get(field, field)}: {problem}")


def _at(values: Mapping[str, Any], column: str) -> Any:
    """Return the value of a column or, for `a.b`, of its entry `b`; `_NO_COLUMN` if missing."""
    if column in values:
        return values[column]
    name, _, rest = column.partition(".")
    inner = values.get(name) if rest else None
    return _at(inner, rest) if isinstance(inner, Mapping) else _NO_COLUMN


def read_rows(source: str, name: str | None, split: str) -> Iterable[Any]:
    """Read the rows of a file or of a Hugging Face data set, in order."""
    path = Path(source)
    if path.suffix in _READERS and path.is_file():
        return _rows_of(path)
    if path.exists() or path.suffix in _READERS or source.startswith(("/", ".")):
        problem = "not readable" if path.exists() else "no such file"
        kinds = ", ".join(_READERS)
        raise ValueError(f"dataset {source}: {problem}; allowed: a file of {kinds}, or a hub name")
    try:
        return datasets.load_dataset(source, name, split=split)
    except (OSError, ValueError, DatasetsError) as error:
        cause = f"{error}: {error.__cause__}" if error.__cause__ else error
        raise ValueError(f"dataset {source}: cannot be loaded: {cause}") from error


def _rows_of(path: Path) -> Iterator[Any]:
    number = 1
    try:
        with path.open("rb") as file:
            for number, row in enumerate(_READERS[path.suffix](file), start=1):
                yield row
                number += 1
    except (OSError, ValueError, RecursionError, csv.Error, pyarrow.ArrowException) as error:
        where = f"dataset {path}, from row {number} on"
        allowed = f"; allowed: {_LAYOUTS[path.suffix]}" if path.suffix in _LAYOUTS else ""
        raise ValueError(f"{where}: not readable: {error}{allowed}") from error


def _json_lines(file: BinaryIO) -> Iterator[Any]:
    for line in filter(bytes.strip, file):
        yield json.loads(line)


def _json_list(file: BinaryIO) -> Iterator[Any]:
    rows = json.load(file)
    if not isinstance(rows, list):
        raise ValueError("no list")
    yield from rows


def _csv_rows(file: BinaryIO) -> Iterator[Any]:
    csv.field_size_limit(sys.maxsize)  # the default of 128 KiB is less than many tests of programs
    text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    lines = filter(None, csv.reader(text, strict=True))  # skip empty lines
    names = next(lines, [])
    if len(set(names)) < len(names):
        raise ValueError("two columns have one name")
    for values in lines:
        if len(values) != len(names):
            raise ValueError(f"{len(values)} values for {len(names)} columns")
        yield dict(zip(names, values, strict=True))


def _parquet_rows(file: BinaryIO) -> Iterator[Any]:
    for batch in pyarrow.parquet.ParquetFile(file).iter_batches():
        yield from batch.to_pylist()


_LAYOUTS = {
    ".jsonl": "a .jsonl file has one object a line",
    ".json": "a .json file is one list of objects; name a file with one object a line .jsonl",
}
_READERS: dict[str, Callable[[BinaryIO], Iterator[Any]]] = {
    ".jsonl": _json_lines,
    ".json": _json_list,
    ".parquet": _parquet_rows,
    ".csv": _csv_rows,
}
