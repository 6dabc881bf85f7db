"""Text of a model is shown, and gives the terminal no orders."""

import logging
import sys
import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from grpo_components.plain_text import PlainFormatter, one_line, plain

ORDERS = {
    "clear the screen": "\x1b[2J",
    "set the title": "\x1b]0;mine\x07",
    "half a pair": "\ud800",
}
ORDERS |= {"back over the line": "error\rfine ", "a C1 introducer": "\x9b31m"}
ORDERS |= {"turn the direction": "\u202eenif", "bell and delete": "\x07\x7f"}
ORDERS |= {"line separators": "a\u2028b\x85c"}


def test_an_order_to_the_terminal_is_shown_as_text():
    for order, text in ORDERS.items():
        shown = plain(text)
        assert shown.isprintable() and "\\" in shown, order
        shown.encode()  # half a surrogate pair could not be written


@given(st.text())
def test_no_control_character_is_left_and_printable_text_is_unchanged(text):
    def orders(shown):
        return [c for c in shown if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")]

    assert set(orders(plain(text))) <= set("\n\t")
    assert orders(one_line(text)) == []
    if text.isprintable():
        assert plain(text) == text


def test_a_logged_error_keeps_its_traceback_and_gives_no_orders():
    try:
        raise ValueError("in '\x1b[2J'")
    except ValueError:
        record = logging.LogRecord("a", 30, "b", 1, "%s\r", ("%s\x07",), sys.exc_info())
    written = PlainFormatter(logging.BASIC_FORMAT).format(record)
    assert written.startswith(r"WARNING:a:%s\x07\r") and "Traceback" in written
    assert "\x1b" not in written and r"in '\x1b[2J'" in written
