"""Makes values of a run safe to show in a page: without markup and control characters."""

from __future__ import annotations

import functools
import html
import json
import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

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


def label(value: Any) -> str:
    """Return a value as a chart label, escaped because plotly renders some tags in labels."""
    return html.escape(text(value, _MAX_LABEL_CHARS), quote=False).replace("\n", " ")


def script_json(value: Any) -> str:
    """Return a value as JSON that cannot open or close a tag or comment in a script element."""
    found = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        found = found.replace(character, f"\\u{ord(character):04x}")
    return found


def part(name: str, *values: Any) -> Markup:
    """Render a macro of `parts.html`; values are escaped, except `Markup`."""
    return getattr(_templates().get_template("parts.html").module, name)(*values)


def whole_page(**values: Any) -> str:
    """Render the template `page.html`."""
    return _templates().get_template("page.html").render(values)


@functools.cache
def _templates() -> Environment:
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        finalize=lambda value: value if isinstance(value, Markup) else text(value),
    )
    templates.filters |= {"cut": text, "thousands": "{:,}".format}
    templates.filters["anchor"] = lambda name: name.lower().replace(" ", "-")
    templates.filters["pairs"] = lambda values: [(value, value) for value in values]
    return templates
