"""Whatever a model says stays text: for the browser, the script that reads it, and the eye."""

import html
import json
import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from grpo_components.report.shown import escaped, script_json, text

ANY_TEXT = st.text(st.characters(codec=None), max_size=40)  # lone surrogates, too


@given(ANY_TEXT)
def test_no_character_gives_orders_or_turns_the_text(said):
    shown = text(said)
    kinds = {unicodedata.category(c) for c in shown if c not in "\n\t"}
    assert not kinds & {"Cc", "Cf", "Cs", "Zl", "Zp"}
    shown.encode()


@given(ANY_TEXT)
def test_as_html_there_is_no_tag_and_nothing_is_lost(said):
    assert not set(escaped(said)) & set("<>\"'")
    assert html.unescape(escaped(said)) == text(said)


@given(st.recursive(ANY_TEXT | st.integers() | st.none(), st.lists, max_leaves=5))
def test_in_a_script_nothing_closes_it_and_the_value_comes_back(value):
    found = script_json(value)
    assert not set(found) & set("<>&") and found.isascii()
    assert json.loads(found) == value


def test_long_text_keeps_its_ends_and_says_how_much_is_left_out():
    shown = text("a" * 500 + "b" * 500, 100)
    assert shown.startswith("a" * 75 + "\n") and shown.endswith("\n" + "b" * 25)
    assert "900 characters are not shown" in shown
    assert text("a" * 100, 100) == "a" * 100
