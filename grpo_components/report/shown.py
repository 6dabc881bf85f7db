"""A run's values as a page may hold them: text that a browser cannot take for anything else."""

from __future__ import annotations

import html
import json
import math
import re
from typing import Any

from grpo_components.plain_text import plain

_LONGEST_LABEL = 60
_SUSPECT = re.compile(r"[^\x20-\x7e\n\t]+")


def text(value: Any, longest: int | None = None) -> str:
    """A value as text without control and direction characters; cut in its middle if too long.

    Args:
        value: of any kind.
        longest: characters to keep; None keeps all.
    """
    whole = str(value)
    if longest is not None and len(whole) > longest:
        head, tail = whole[: longest * 3 // 4], whole[len(whole) - longest // 4 :]
        whole = f"{head}\n[... {len(whole) - longest:,} characters are not shown ...]\n{tail}"
    return _SUSPECT.sub(lambda found: plain(found[0]), whole)


def escaped(value: Any, longest: int | None = None) -> str:
    """The same as HTML."""
    return html.escape(text(value, longest))


def label(value: Any) -> str:
    """The same in a chart: plotly takes some tags in its texts for markup."""
    return html.escape(text(value, _LONGEST_LABEL), quote=False).replace("\n", " ")


def script_json(value: Any) -> str:
    """JSON that can stand between script tags: nothing in it opens or ends a tag or a comment."""
    try:
        found = json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:  # a mean of damaged values
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
