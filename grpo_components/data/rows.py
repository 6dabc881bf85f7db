"""Rows of a data source, a file or a Hugging Face data set, with failures that name their place."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import datasets
import pyarrow
import pyarrow.parquet
from datasets.exceptions import DatasetsError


class Row:
    """One row of a data source, read by the names that a builder has for its fields.

    Args:
        values: what the source has; anything but a mapping has no field.
        where: source and number of the row, for errors.
        columns: names of the source's columns, for those fields that have another there.
    """

    def __init__(self, values: Any, where: str, columns: Mapping[str, str]) -> None:
        self._values, self._where, self._columns = values, where, columns
        self.asked: set[str] = set()
        """Fields that were asked for."""

    def value(self, field: str) -> Any:
        """A field as the source has it; of a CSV file that is a text.

        Raises:
            ValueError: if the row has no such column.
        """
        self.asked.add(field)
        column = self._columns.get(field, field)
        if not isinstance(self._values, dict):
            raise ValueError(f"{self._where}: has no field {column}, nor any other")
        if column not in self._values:
            has = ", ".join(map(str, self._values))
            raise ValueError(f"{self._where}: has no field {column}; it has {has}")
        return self._values[column]

    def has(self, field: str) -> bool:
        """Whether there is a column for a field, or one was named for it."""
        self.asked.add(field)
        is_there = isinstance(self._values, dict) and field in self._values
        return is_there or field in self._columns

    def text(self, field: str) -> str:
        """A field that holds a text.

        Raises:
            ValueError: if it holds anything else, or nothing.
        """
        value = self.value(field)
        if not isinstance(value, str) or not value.strip():
            self.refuse(field, "must be a text that is not empty")
        try:
            value.encode()  # JSON can hold half a surrogate pair, which no tokenizer takes
        except UnicodeEncodeError as error:
            self.refuse(field, f"is no Unicode text: {error}")
        return value

    def text_or_number(self, field: str) -> str:
        """A field that holds a text, or a number as it is written: 0.5, and 42 for 42.0.

        Raises:
            ValueError: if it holds anything else, or nothing.
        """
        value = self.value(field)
        if isinstance(value, float) and math.isfinite(value):
            return str(int(value)) if value.is_integer() else str(value)
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        return str(value) if is_whole else self.text(field)

    def parsed(self, field: str) -> Any:
        """A field that holds a list, a mapping or a number, or a text of it in JSON.

        Raises:
            ValueError: if it is a text that is no JSON.
        """
        value = self.value(field)
        if not isinstance(value, str):
            return value
        try:
            return json.loads(value)
        except (ValueError, RecursionError) as error:
            self.refuse(field, f"is no JSON: {error}")

    def refuse(self, field: str, problem: str) -> NoReturn:
        """Say what is wrong with a field.

        Raises:
            ValueError: always, naming source, row and column.
        """
        raise ValueError(f"{self._where}, field {self._columns.get(field, field)}: {problem}")


def read_rows(source: str, name: str | None, split: str) -> Iterable[Any]:
    """The rows of a source in their order.

    Args:
        source: a file with one of `SUFFIXES`, or the name of a Hugging Face data set.
        name: configuration of a Hugging Face data set.
        split: of a Hugging Face data set.

    Raises:
        ValueError: naming the source, and the row where there is one.
    """
    path = Path(source)
    if path.suffix in _READERS:
        return _READERS[path.suffix](path)
    if path.exists() or source.startswith(("/", ".")):
        kinds = ", ".join(_READERS)
        raise ValueError(
            f"dataset {source}: not readable; allowed: a file of {kinds}, or a hub name"
        )
    try:
        return datasets.load_dataset(source, name, split=split)
    except (OSError, ValueError, DatasetsError) as error:
        cause = f"{error}: {error.__cause__}" if error.__cause__ else error
        raise ValueError(f"dataset {source}: cannot be loaded: {cause}") from error


def _check_there(path: Path) -> None:
    if not path.is_file():
        raise ValueError(f"dataset {path}: no such file")


def _json_lines(path: Path) -> Iterator[Any]:
    _check_there(path)
    with path.open("rb") as file:
        lines = (line for line in file if line.strip())
        for number, line in enumerate(lines, start=1):
            try:
                yield json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except (ValueError, RecursionError) as error:
                raise ValueError(f"dataset {path}, row {number}: not readable: {error}") from None


def _json_list(path: Path) -> Iterator[Any]:
    _check_there(path)
    try:
        rows = json.loads(path.read_bytes().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"dataset {path}: not readable: {error}") from None
    if not isinstance(rows, list):
        raise ValueError(f"dataset {path}: must be one list of rows (a row per line is .jsonl)")
    yield from rows


def _csv_rows(path: Path) -> Iterator[Any]:
    _check_there(path)
    number = 0  # of the row that was read last; the header is none
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = filter(None, csv.reader(file, strict=True))  # a line with nothing is no row
            names = next(lines, [])
            if len(set(names)) < len(names):
                raise ValueError("two columns have one name")
            for values in lines:
                number += 1
                if len(values) != len(names):
                    raise ValueError(f"{len(values)} values for {len(names)} columns")
                yield dict(zip(names, values, strict=True))
    except (csv.Error, ValueError) as error:
        where = f"dataset {path}, at row {number}" if number else f"dataset {path}"
        raise ValueError(f"{where}: not readable: {error}") from None


def _parquet_rows(path: Path) -> Iterator[Any]:
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield row
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        after = f", after row {number}" if number else ""
        raise ValueError(f"dataset {path}{after}: cannot be loaded: {error}") from error


_READERS: dict[str, Callable[[Path], Iterator[Any]]] = {
    ".jsonl": _json_lines,
    ".json": _json_list,
    ".parquet": _parquet_rows,
    ".csv": _csv_rows,
}
SUFFIXES = tuple(_READERS)
"""Of files that can be read."""
