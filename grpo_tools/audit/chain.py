"""The `chain` rule: no record was changed, removed, added or moved."""

from __future__ import annotations

from pathlib import Path

from grpo_components.records.receipt_chain import END_FILE, End, link, read_end, split
from grpo_tools.audit.findings import Findings


class Chain:
    """Checks the hash of each record, and that `receipts.end` names the last record."""

    def __init__(self, receipts: Path, findings: Findings) -> None:
        self._check, self._findings = findings.check, findings
        self._problem, self._known = "", None
        # Read before the records: read after them, it could name a record written in between.
        try:
            self._known = read_end(receipts)
        except (OSError, ValueError) as error:
            self._problem = f"cannot be read: {error}"
        self._end = End()
        self._reached = self._known == self._end

    def follow(self, line: bytes) -> bytes:
        """Check the hash of the next line."""
        fields, stated = split(line)
        expected = link(self._end.chain, fields)
        self._check(
            "chain",
            stated == expected,
            "hash mismatch: this record or its predecessor was changed, or a record between "
            "them is missing",
        )
        self._end = End(self._end.records + 1, stated or expected)
        self._reached |= self._end == self._known
        return fields

    def finish(self, unfinished: bool) -> None:
        """Compare the last record with `receipts.end`."""
        self._findings.where = END_FILE
        self._check("chain", not self._problem, self._problem)
        if self._problem:
            return
        exists = self._known is not None
        self._check("chain", exists, "missing; it has the hash of the last record")
        if self._known is None:
            return
        problem = f"names record {self._known.records} with hash {self._known.chain[:8]}...; "
        problem += f"the receipts have {self._end.records} records and not this one"
        # A run killed after writing a record and before updating receipts.end has one extra.
        extra = self._end.records - self._known.records
        self._check("chain", self._reached and (unfinished or extra <= 1), problem)
