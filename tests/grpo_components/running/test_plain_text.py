"""What a model writes is shown, and not obeyed."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_components.running.plain_text import one_line, plain

ORDERS = {
    "clear the screen": "\x1b[2J",
    "set the title": "\x1b]0;mine\x07",
    "back over the line": "error\rfine ",
    "a C1 introducer": "\x9b31m",
    "turn the direction": "\u202eenif",
    "bell and delete": "\x07\x7f",
    "line separators": "a\u2028b\x85c",
    "half a pair": "\ud800",
}


@pytest.mark.parametrize("order", ORDERS)
def test_an_order_to_the_terminal_is_shown_as_text(order):
    shown = plain(ORDERS[order])
    assert shown.isprintable() and "\\" in shown
    shown.encode()  # a half pair could not be written


@given(st.text())
def test_no_control_character_is_left_and_printable_text_is_unchanged(text):
    def orders(shown):
        return [c for c in shown if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")]

    assert set(orders(plain(text))) <= set("\n\t")
    assert orders(one_line(text)) == []
    if text.isprintable():
        assert plain(text) == text
