"""The rule of the chain: no record was changed, removed, added or moved."""

from __future__ import annotations

from pathlib import Path

from grpo_components.audit.findings import Report
from grpo_components.records.receipt_chain import END_FILE, End, link, read_end, split

_NO_CHAIN = "no chain: an older version wrote these receipts; what breaks no other rule goes unseen"


class Chain:
    """Follows the hashes of the records, from the first to the one that `receipts.end` names.

    Args:
        receipts: path of the file.
        report: told what is checked.
    """

    def __init__(self, receipts: Path, report: Report) -> None:
        self._check, self._report = report.check, report
        self._problem, self._known = "", None
        # Read before the records: of a run that still writes it knows no more than they.
        try:
            self._known = read_end(receipts)
        except (OSError, ValueError) as error:
            self._problem = f"it cannot be read: {error}"
        self._end = End()
        self._unchained = 0
        self._reached = self._known == self._end

    def follow(self, line: bytes) -> bytes:
        """Check the hash of the next line.

        Args:
            line: without its line end.

        Returns:
            The line without its hash.
        """
        fields, stated = split(line)
        expected = link(self._end.chain, fields)
        if stated is None:
            if self._unchained < self._end.records:
                self._check("chain", False, "it has no hash, and records before it have")
            self._unchained += 1
        else:
            self._check(
                "chain",
                stated == expected,
                "its hash is not that of this record after the one before: one of them was "
                "changed, or a record between them is missing",
            )
        self._end = End(self._end.records + 1, stated or expected)
        self._reached |= self._end == self._known
        return fields

    def check_format(self, number: int) -> None:
        """Check that a start record has a hash exactly if its format has one.

        Args:
            number: its format.
        """
        chained = self._end.records > self._unchained
        if chained or number > 1:
            said = f"format {number} has {'a' if number > 1 else 'no'} hash in every record"
            self._check("chain", chained == (number > 1), said)

    def finish(self, unfinished: bool) -> None:
        """Compare the last record with `receipts.end`.

        Args:
            unfinished: whether the run may have gone on since that was read.
        """
        self._report.where = END_FILE
        if self._end.records == self._unchained and self._known is None and not self._problem:
            self._report.notes.append(_NO_CHAIN)
            return
        self._check("chain", not self._problem, self._problem)
        if self._problem:
            return
        there = self._known is not None
        self._check("chain", there, "it is missing; it holds the hash of the last record")
        if self._known is None:
            return
        said = f"record {self._known.records} with the hash {self._known.chain[:8]}... is the last "
        said += f"or the one before; the receipts have {self._end.records}, and not this one there"
        # A run that is killed between the two files leaves one record more.
        extra = self._end.records - self._known.records
        self._check("chain", self._reached and (unfinished or extra <= 1), said)
