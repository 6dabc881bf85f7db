"""Text of a model, a user's code or a library, made safe to show: a terminal must not obey it."""

from __future__ import annotations

import logging
import unicodedata


def plain(text: str) -> str:
    r"""The text with control characters as escapes (`\x1b`), but for line ends and tabs."""
    return "".join(
        repr(character)[1:-1]
        if unicodedata.category(character) in _UNPRINTABLE and character not in "\n\t"
        else character
        for character in text
    )


_UNPRINTABLE = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Control and formatting characters (of direction, too), surrogates, line and paragraph ends."""


def one_line(text: str) -> str:
    """The same in one line, any white space as one space."""
    return plain(" ".join(text.split()))


def shortened(text: str, most: int) -> str:
    """The text, or its start and end with " ... " between them: at most `most` characters."""
    if len(text) <= most:
        return text
    end = most // 4
    return f"{text[: most - end - 5].rstrip()} ... {text[-end:].lstrip()}"


class PlainFormatter(logging.Formatter):
    """Log records, and the tracebacks in them, as plain text: an error may quote a response."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as text."""
        return plain(super().format(record))
