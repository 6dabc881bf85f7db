"""Chains the lines of receipts.jsonl by hashes, so that `grpo audit` finds lost or changed ones."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_components.files import cut_torn_line

END_FILE = "receipts.end"
"""File next to receipts.jsonl: the number of its records and the hash in the last record."""
_HASH = re.compile(rb', "chain": "([0-9a-f]{64})"\}$')


@dataclass(frozen=True)
class End:
    """Where a chain of records ends: its length and its last hash."""

    records: int = 0
    """Number of records in the chain."""
    chain: str = ""
    """Hash of all records in the chain: sha256, in hexadecimal; empty without records."""


def link(before: str, fields: bytes) -> str:
    """Hash a record's `fields` (JSON) together with `before`, the hash of all earlier records."""
    return hashlib.sha256(before.encode() + b"\n" + fields).hexdigest()


def split(line: bytes) -> tuple[bytes, str | None]:
    """Split a line into the record without its hash, and the hash (None if the line has none)."""
    found = _HASH.search(line)
    return (line, None) if found is None else (line[: found.start()] + b"}", found[1].decode())


def read_end(receipts: Path) -> End | None:
    """Read number of records and last hash from `receipts.end`; None if the file is missing."""
    path = receipts.with_name(END_FILE)
    if not path.exists():
        return None
    if not (content := path.read_bytes()):
        return End()  # created, but not yet written
    try:
        found = json.loads(content)
        return End(int(found["records"]), str(found["chain"]))
    except (ValueError, KeyError, TypeError):
        problem = "it does not contain one number of records and one hash"
        raise ValueError(problem) from None


class ChainedFile:
    """Appends records to receipts.jsonl, each chained to the record before by its hash.

    Opening the file cuts off an incomplete last line. If `receipts.end` counts more records than
    the file has, records were lost. The next record is then chained to the last lost one, so that
    the audit finds the gap, however many records follow.
    """

    def __init__(self, path: Path) -> None:
        cut_torn_line(path)
        self._path, self._end = path, _continue_from(path)
        self._file = path.open("a", encoding="utf-8")
        end_file = path.with_name(END_FILE)
        end_file.touch()
        # It is overwritten in place: one short write is never partial, and it fits on a full disk.
        self._end_file = end_file.open("r+b", buffering=0)

    @property
    def closed(self) -> bool:
        """Whether the file is closed."""
        return self._file.closed

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record with its hash, then update `receipts.end`.

        A kill between the two writes leaves one record more than `receipts.end` counts.
        """
        fields, file = json.dumps(record, allow_nan=False), self._file
        chain = link(self._end.chain, fields.encode())
        try:
            file.write(f'{fields[:-1]}, "chain": "{chain}"}}\n')
            file.flush()
            self._end, file = End(self._end.records + 1, chain), self._end_file
            self._write_end()
        except OSError as error:
            self.close()
            raise OSError(error.errno, f"cannot be written: {error.strerror}", file.name) from error

    def close(self) -> None:
        """Close the receipts and `receipts.end`; a second call does nothing."""
        self._end_file.close()
        with suppress(OSError):  # the failed write was already reported
            self._file.close()

    def _write_end(self) -> None:
        line = f'{{"records": {self._end.records:>15}, "chain": "{self._end.chain}"}}\n'
        self._end_file.seek(0)
        self._end_file.write(line.encode())
        self._end_file.truncate()


def _continue_from(path: Path) -> End:
    """Return the end to chain the next record to: the file's last record, or the last lost one."""
    try:
        known = read_end(path)
    except ValueError:
        known = None
    lines = path.read_bytes().splitlines() if path.exists() else []
    chain = (split(lines[-1])[1] or "") if lines else ""
    lost = known is not None and known.records > len(lines)
    return End(len(lines), known.chain if lost and known else chain)
