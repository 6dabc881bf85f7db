"""Makes values of a run safe to show in a page: without markup and control characters."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from typing import Any

from grpo_components.plain_text import plain

_MAX_LABEL_CHARS, _MAX_CELL_CHARS = 60, 500
_NOT_PLAIN = re.compile(r"[^\x20-\x7e\n\t]+")


def text(value: Any, max_chars: int | None = None) -> str:
    """Return a value as text, with control and bidirectional characters escaped."""
    whole = str(value)
    if max_chars is not None and len(whole) > max_chars:
        head, tail = whole[: max_chars * 3 // 4], whole[len(whole) - max_chars // 4 :]
        whole = f"{head}\n[... {len(whole) - max_chars:,} characters omitted ...]\n{tail}"
    return _NOT_PLAIN.sub(lambda match: plain(match[0]), whole)


def escaped(value: Any, max_chars: int | None = None) -> str:
    """Return a value as HTML text; the arguments are those of `text`."""
    return html.escape(text(value, max_chars))


def label(value: Any) -> str:
    """Return a value as a chart label, escaped because plotly renders some tags in labels."""
    return html.escape(text(value, _MAX_LABEL_CHARS), quote=False).replace("\n", " ")


def script_json(value: Any) -> str:
    """Return a value as JSON that cannot open or close a tag or comment in a script element."""
    found = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        found = found.replace(character, f"\\u{ord(character):04x}")
    return found


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return an HTML table, with numbers aligned right."""
    head = "".join(f'<th scope="col">{escaped(column)}</th>' for column in columns)
    body = "".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows)
    parts = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="scroll"><table>{parts}</table></div>'


def _cell(value: Any) -> str:
    kind = ' class="number"' if isinstance(value, (int, float)) else ""
    return f"<td{kind}>{escaped('-' if value is None else value, _MAX_CELL_CHARS)}</td>"
