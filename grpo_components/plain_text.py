"""Makes text from models, user code and libraries safe to print on a terminal."""

from __future__ import annotations

import logging
import unicodedata


def plain(text: str) -> str:
    r"""Escape control characters (`\x1b`); line ends and tabs stay."""
    return "".join(
        repr(character)[1:-1]
        if unicodedata.category(character) in _UNPRINTABLE and character not in "\n\t"
        else character
        for character in text
    )


_UNPRINTABLE = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode categories: control, format (e.g. text direction), surrogate, line or paragraph break."""


def one_line(text: str) -> str:
    """Escape control characters and turn each run of white space into one space."""
    return plain(" ".join(text.split()))


def shortened(text: str, max_chars: int) -> str:
    """Cut text to `max_chars` characters: its start and its end, joined by " ... "."""
    if len(text) <= max_chars:
        return text
    end = max_chars // 4
    return f"{text[: max_chars - end - 5].rstrip()} ... {text[-end:].lstrip()}"


class PlainFormatter(logging.Formatter):
    """Formats log records with control characters escaped: a traceback may quote model output."""

    def format(self, record: logging.LogRecord) -> str:
        """Format one record, with its traceback."""
        return plain(super().format(record))
