"""Writes the table of held-out metrics."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_components.shapes import fits
from grpo_tools.report.curves import measured_after
from grpo_tools.report.run_files import Number, Record
from grpo_tools.report.tables import table

_ENDS = ("_low", "_high")
_BOOKKEEPING = ("eval/step", "eval/policy_version", "eval/prompts")


def held_out_table(metrics: Sequence[Record]) -> str:
    """Return HTML with the metrics of the last evaluation; empty if there is none."""
    evaluated = [record for record in metrics if any(key.startswith("eval/") for key in record)]
    if not evaluated:
        return ""
    last = evaluated[-1]
    rows = [
        (key.removeprefix("eval/"), _number(last, key), _interval(last, key))
        for key in last
        if key.startswith("eval/") and not key.endswith(_ENDS) and key not in _BOOKKEEPING
    ]
    version, prompts = (_whole(last.get(f"eval/{key}")) for key in ("policy_version", "prompts"))
    step = measured_after(last, "eval/step")
    about = f"after step {step}: policy version {version}, {prompts} prompts"
    columns = ("metric", "mean over prompts", "95 % interval")
    return f'<div class="box"><p class="about">{about}</p>{table(columns, rows)}</div>'


def _number(record: Record, key: str) -> str | None:
    return f"{record[key]:.4g}" if fits(record.get(key), Number) else None


def _interval(record: Record, key: str) -> str | None:
    low, high = (_number(record, key + end) for end in _ENDS)
    return None if low is None or high is None else f"{low} to {high}"


def _whole(value: object) -> str:
    return str(value) if isinstance(value, int) else "-"
