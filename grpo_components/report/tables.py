"""Tables of a report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpo_components.report.shown import escaped

_LONGEST = 500
"""Characters of a cell."""


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Rows of values as HTML; numbers stand to the right.

    Args:
        columns: names.
        rows: a value for each column; None becomes a dash.
    """
    head = "".join(f'<th scope="col">{escaped(column)}</th>' for column in columns)
    body = "".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows)
    parts = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="scroll"><table>{parts}</table></div>'


def _cell(value: Any) -> str:
    kind = ' class="number"' if isinstance(value, (int, float)) else ""
    return f"<td{kind}>{escaped('-' if value is None else value, _LONGEST)}</td>"
