"""Writes the section on dropped groups and failed samples, with reasons."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from typing_extensions import TypedDict

from grpo_tools.report.run_files import Receipts, read_records
from grpo_tools.report.tables import table
from grpo_tools.report.unread import Unread

_MAX_ROWS = 100
_MAX_REASONS = 50
_REASONS = {
    "stale": "older than max_staleness when the batch was formed",
    "failed": "none of its samples could be scored, or its generator was lost",
    "filtered": "dynamic sampling replaced its prompt with another",
}


class _FailedSamples(TypedDict):
    errors: dict


def dropped_section(receipts: Receipts, failed_samples: Path, unread: Unread | None = None) -> str:
    """Return HTML that lists dropped groups and failed samples."""
    parts = []
    if receipts.drops:
        counts = Counter(str(drop["reason"]) for drop in receipts.drops)
        why = [
            (reason, n, _REASONS.get(reason, "")) for reason, n in counts.most_common(_MAX_REASONS)
        ]
        columns = ("step", "group_id", "reason", "prompt_index", "epoch", "reissue")
        last = [
            [
                ("no", "yes")[value] if isinstance(value, bool) else value
                for value in map(drop.get, columns)
            ]
            for drop in receipts.drops[-_MAX_ROWS:]
        ]
        parts += [
            '<div class="box">',
            table(("reason", "groups", "meaning"), why),
            f"<details><summary>the last {len(last)} of {len(receipts.drops):,}</summary>",
            table(("before step", "group", "reason", "prompt", "epoch", "issued again"), last),
            "</details></div>",
        ]
    else:
        parts.append('<p class="about">No group was dropped.</p>')
    failures = list(read_records(failed_samples, _FailedSamples, unread))
    if failures:
        rows = [
            (
                str(record.get("attempt", 0)),
                f"evaluation at step {record['evaluation']}"
                if "evaluation" in record
                else f"group {record.get('group_id')}",
                str(record.get("prompt_index")),
                "\n".join(f"{n} x {error}" for error, n in record["errors"].items()),
            )
            for record in failures[-_MAX_ROWS:]
        ]
        parts += [
            '<div class="box"><h3>Failed samples</h3><p class="about">',
            f"the last {len(rows)} of {len(failures):,} records in logs/failed_samples.jsonl</p>",
            table(("attempt", "where", "prompt", "errors"), rows),
            "</div>",
        ]
    return "".join(parts)
