"""The chain of receipts: each record holds a hash of itself and of the record before it."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_components.files import append_line, cut_torn_line

END_FILE = "receipts.end"
"""File beside the receipts: the number of records, and the hash of the last one."""
_MAX_BYTES = 200
_HASH = re.compile(rb', "chain": "([0-9a-f]{64})"\}$')
_END = re.compile(rb'\{"records": {1,20}([0-9]{1,15}), "chain": "([0-9a-f]{64}|)"\} {0,20}\n?')


@dataclass(frozen=True)
class End:
    """Where a chain ends."""

    records: int = 0
    """Number of records."""
    chain: str = ""
    """Hash of all records: sha256, hexadecimal; empty without a record."""


def link(before: str, fields: bytes) -> str:
    """The hash of a record and of all records before it.

    Args:
        before: hash of the record before; empty for the first.
        fields: the record's line, without its hash and its line end.

    Returns:
        sha256 of both, hexadecimal.
    """
    return hashlib.sha256(before.encode() + b"\n" + fields).hexdigest()


def split(line: bytes) -> tuple[bytes, str | None]:
    """Split a line into its record and its hash, None if it has no hash.

    Args:
        line: of the receipts, without its line end.
    """
    found = _HASH.search(line)
    return (line, None) if found is None else (line[: found.start()] + b"}", found[1].decode())


def read_end(receipts: Path) -> End | None:
    """Read `receipts.end`; None if there is no such file.

    Args:
        receipts: path of the receipts.

    Raises:
        ValueError: if its content has another form.
        OSError: if it cannot be read.
    """
    path = receipts.with_name(END_FILE)
    if not path.exists() and not path.is_symlink():
        return None
    if not path.is_file():
        raise ValueError("not a file")
    with path.open("rb") as file:
        content = file.read(_MAX_BYTES + 1)
    if not content:
        return End()  # created, and not written yet
    found = _END.fullmatch(content)
    if found is None:
        raise ValueError("expected one number of records and one hash")
    return End(int(found[1]), found[2].decode())


class ChainedFile:
    """Appends records to the receipts, and chains each to the one before.

    An incomplete last line is removed. If records are missing that `receipts.end` counts, the chain
    continues from the missing ones, so that the audit always finds the gap.

    Args:
        path: of the receipts; the folder exists.
    """

    def __init__(self, path: Path) -> None:
        cut_torn_line(path)
        self._path, self._end = path, _go_on_from(path)
        self._file = path.open("a", encoding="utf-8")
        # Written in place: the content is always the old or the new one, and a full disk has room.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._beside: int | None = os.open(path.with_name(END_FILE), flags, 0o666)
        except OSError:
            self._file.close()
            raise

    @property
    def closed(self) -> bool:
        """Whether no more records can be appended."""
        return self._file.closed

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record with its hash, then its hash to `receipts.end`.

        A run killed between the two leaves one record more than `receipts.end` counts.

        Args:
            record: plain values, no NaN.

        Raises:
            OSError: naming the file, if it cannot be written.
        """
        fields = json.dumps(record, allow_nan=False)
        chain = link(self._end.chain, fields.encode())
        try:
            append_line(self._file, f'{fields[:-1]}, "chain": "{chain}"}}')
            self._end = End(self._end.records + 1, chain)
            self._write_end()
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Close both files; closing a second time does nothing."""
        beside, self._beside = self._beside, None
        if beside is not None:
            os.close(beside)
        with suppress(OSError):  # a failed write was reported when it happened
            self._file.close()

    def _write_end(self) -> None:
        assert self._beside is not None
        content = f'{{"records": {self._end.records:>15}, "chain": "{self._end.chain}"}}\n'
        try:
            written = os.pwrite(self._beside, content.encode(), 0)
            os.ftruncate(self._beside, written)
        except OSError as error:
            path = str(self._path.with_name(END_FILE))
            raise OSError(error.errno, f"cannot be written: {error.strerror}", path) from error


def _go_on_from(path: Path) -> End:
    """What the next record is chained to: the last record, or the last missing one."""
    try:
        known = read_end(path)
    except ValueError:
        known = None
    end, reached = End(), known is None or known == End()
    for end in _ends(path):
        reached = reached or end == known
    return end if reached else End(end.records, known.chain if known else "")


def _ends(path: Path) -> Iterator[End]:
    """The end after each record; computes the hash of records of older versions, without one."""
    if not path.exists():
        return
    chain = ""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            fields, stated = split(line.removesuffix(b"\n"))
            chain = stated or link(chain, fields)
            yield End(number, chain)
