"""Chains the records of receipts.jsonl: each has a hash of itself and of all records before it."""

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
"""File beside receipts.jsonl that has the number of its records and the hash in the last one."""
_MAX_BYTES = 200
_HASH = re.compile(rb', "chain": "([0-9a-f]{64})"\}$')
_END = re.compile(rb'\{"records": {1,20}([0-9]{1,15}), "chain": "([0-9a-f]{64}|)"\} {0,20}\n?')


@dataclass(frozen=True)
class End:
    """The end of a chain: how many records it has, and their hash."""

    records: int = 0
    """Number of records in the chain."""
    chain: str = ""
    """Hash of all records in the chain: sha256, in hexadecimal; empty without records."""


def link(before: str, fields: bytes) -> str:
    """Return the hash of a record and of all records before it."""
    return hashlib.sha256(before.encode() + b"\n" + fields).hexdigest()


def split(line: bytes) -> tuple[bytes, str | None]:
    """Split a line into the record without its hash, and the hash."""
    found = _HASH.search(line)
    return (line, None) if found is None else (line[: found.start()] + b"}", found[1].decode())


def read_end(receipts: Path) -> End | None:
    """Read from `receipts.end` how many records were written, and the last hash."""
    path = receipts.with_name(END_FILE)
    if not path.exists() and not path.is_symlink():
        return None
    if not path.is_file():
        raise ValueError("it is not a file")
    with path.open("rb") as file:
        content = file.read(_MAX_BYTES + 1)
    if not content:
        return End()  # created, but not yet written
    found = _END.fullmatch(content)
    if found is None:
        raise ValueError("it does not contain one number of records and one hash")
    return End(int(found[1]), found[2].decode())


class ChainedFile:
    """Appends receipts to a new or existing chain.

    An incomplete last line is cut off. If `receipts.end` counts more records than the file has, the
    next record is chained to the last lost one, so that the audit finds the gap even after more
    records.
    """

    def __init__(self, path: Path) -> None:
        cut_torn_line(path)
        self._path, self._end = path, _continue_from(path)
        self._file = path.open("a", encoding="utf-8")
        # It is overwritten in place: one short write is never partial, and it fits on a full disk.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._end_file: int | None = os.open(path.with_name(END_FILE), flags, 0o666)
        except OSError:
            self._file.close()
            raise

    @property
    def closed(self) -> bool:
        """Whether the file is closed."""
        return self._file.closed

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record with its hash, then update `receipts.end`.

        A run killed between the two writes leaves one record more than `receipts.end` counts.
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
        """Close both files; a second call does nothing."""
        end_file, self._end_file = self._end_file, None
        if end_file is not None:
            os.close(end_file)
        with suppress(OSError):  # the failed write was already reported
            self._file.close()

    def _write_end(self) -> None:
        assert self._end_file is not None
        line = f'{{"records": {self._end.records:>15}, "chain": "{self._end.chain}"}}\n'.encode()
        try:
            written = os.pwrite(self._end_file, line, 0)
            os.ftruncate(self._end_file, written)
        except OSError as error:
            path = str(self._path.with_name(END_FILE))
            raise OSError(error.errno, f"cannot be written: {error.strerror}", path) from error


def _continue_from(path: Path) -> End:
    """Return the end that the next record continues: the file's, or that of records it lost."""
    try:
        known = read_end(path)
    except ValueError:
        known = None
    end, reached = End(), known is None or known == End()
    for end in _ends(path):
        reached = reached or end == known
    return end if reached else End(end.records, known.chain if known else "")


def _ends(path: Path) -> Iterator[End]:
    """Yield the chain's end after each record."""
    if path.exists():
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                yield End(number, split(line.removesuffix(b"\n"))[1] or "")
