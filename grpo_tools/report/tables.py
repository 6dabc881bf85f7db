"""Formats HTML tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpo_tools.report.safe_text import escaped

_MAX_CELL_CHARS = 500


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return an HTML table, with numbers aligned right."""
    head = "".join(f'<th scope="col">{escaped(column)}</th>' for column in columns)
    body = "".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows)
    parts = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="scroll"><table>{parts}</table></div>'


def _cell(value: Any) -> str:
    kind = ' class="number"' if isinstance(value, (int, float)) else ""
    return f"<td{kind}>{escaped('-' if value is None else value, _MAX_CELL_CHARS)}</td>"
