"""Makes values of a run safe to show in a page: without markup and control characters."""

from __future__ import annotations

import html
import json
import math
import re
from typing import Any

from grpo_components.plain_text import plain

_MAX_LABEL_CHARS = 60
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
    try:
        found = json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:  # a mean of damaged values may be NaN or infinite
        found = json.dumps(_finite(value), allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        found = found.replace(character, f"\\u{ord(character):04x}")
    return found


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
