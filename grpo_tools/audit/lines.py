"""Reads JSON lines strictly: a line that two parsers could read differently is an error."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any, BinaryIO

MAX_LINE_BYTES = 64 * 2**20
_MAX_DIGITS = 16
_MAX_DEPTH = 16
_MAX_SHOWN_CHARS = 40


class UnreadableError(ValueError):
    """A line is not JSON, or two parsers could read it differently."""


def lines_of(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file, split at `\\n` only."""
    while line := file.readline(MAX_LINE_BYTES + 1):
        yield line
        if len(line) > MAX_LINE_BYTES:
            return


def parse(line: bytes) -> Any:
    """Parse the JSON value of a line."""
    if len(line) > MAX_LINE_BYTES:
        raise UnreadableError(f"the line is longer than {MAX_LINE_BYTES} bytes")
    try:
        value = _READER.decode(line.decode())
    except UnicodeDecodeError as error:
        raise UnreadableError(f"not UTF-8 at byte {error.start + 1} of the line") from None
    except json.JSONDecodeError as error:
        raise UnreadableError(f"not JSON: {error.msg} at character {error.pos + 1}") from None
    except RecursionError:
        raise UnreadableError(_TOO_DEEP) from None
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [child for parent in level for child in _children(parent)]
        if not level:
            return value
    raise UnreadableError(_TOO_DEEP)


def _children(value: Any) -> list[Any]:
    found = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [child for child in found if isinstance(child, dict | list)]


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise UnreadableError(f"duplicate key {twice[:_MAX_SHOWN_CHARS]!r}")
    return found


def _integer(literal: str) -> int:
    digits = len(literal.lstrip("-"))
    if digits > _MAX_DIGITS:
        raise UnreadableError(f"an integer of {digits} digits")
    return int(literal)


def _number(literal: str) -> float:
    value = float(literal)
    if not math.isfinite(value):
        raise UnreadableError(f"{literal[:_MAX_SHOWN_CHARS]} is not a finite number")
    return value


_TOO_DEEP = f"more than {_MAX_DEPTH} levels of brackets"
_READER = json.JSONDecoder(
    object_pairs_hook=_object, parse_int=_integer, parse_float=_number, parse_constant=_number
)
