"""Reads the chain of hashes in receipts.jsonl, independently of the code that writes it."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import NamedTuple

END_FILE = "receipts.end"
"""File next to receipts.jsonl with the number of its records and the hash of the last record."""
_CHAINED = re.compile(rb'(.*), "chain": "([0-9a-f]{64})"\}')


class End(NamedTuple):
    """Length and last hash of a chain of records."""

    records: int = 0
    """Number of records in the chain."""
    chain: str = ""
    """Hash in the last record; empty without records."""


def link(before: str, fields: bytes) -> str:
    """Return the hash of a record that follows the record with the hash `before`."""
    return hashlib.sha256(b"%s\n%s" % (before.encode(), fields)).hexdigest()


def split(line: bytes) -> tuple[bytes, str | None]:
    """Split a line into the record without its hash, and the hash; None if it has no hash."""
    found = _CHAINED.fullmatch(line)
    return (found[1] + b"}", found[2].decode()) if found else (line, None)


def read_end(receipts: Path) -> End | None:
    """Read the end of the chain from `receipts.end`; None if the file is missing or damaged."""
    try:
        content = receipts.with_name(END_FILE).read_bytes()
        if not content:
            return End()  # created, but not yet written
        found = json.loads(content)
        return End(int(found["records"]), str(found["chain"]))
    except (OSError, ValueError, LookupError, TypeError, OverflowError):
        return None
