"""Text of a model is shown, and gives the terminal no orders."""

import logging
import sys
import unicodedata

from hypothesis import example, given
from hypothesis import strategies as st

from grpo_components.plain_text import PlainFormatter, one_line, plain


@example("\x1b]0;mine\x07")
@example("\u202eenif")
@given(st.text(st.characters(exclude_categories=())))  # half a surrogate pair, too
def test_orders_to_the_terminal_are_shown_as_text_and_printable_text_is_unchanged(text):
    def orders(shown):
        kinds = ("Cc", "Cf", "Cs", "Zl", "Zp")
        return {c for c in shown if unicodedata.category(c) in kinds} - {"\n", "\t"}

    shown, line = plain(text), one_line(text)
    assert not orders(shown + line) and not set("\n\t") & set(line)
    assert "\\" in shown or not orders(text)
    shown.encode()  # half a pair could not be written
    if text.isprintable():
        assert shown == text


def test_a_logged_error_keeps_its_traceback_and_gives_no_orders():
    try:
        raise ValueError("in '\x1b[2J'")
    except ValueError:
        record = logging.LogRecord("a", 30, "b", 1, "%s\r", ("%s\x07",), sys.exc_info())
    written = PlainFormatter(logging.BASIC_FORMAT).format(record)
    assert written.startswith(r"WARNING:a:%s\x07\r") and "Traceback" in written
    assert "\x1b" not in written and r"in '\x1b[2J'" in written
