"""A model's text stays text: in HTML, in a script element, and on screen."""

import html
import json
import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from grpo_tools.report.safe_text import part, script_json, text

ANY_TEXT = st.text(st.characters(codec=None), max_size=40)  # lone surrogates, too


@given(ANY_TEXT)
def test_control_and_direction_characters_are_escaped(value):
    shown = text(value)
    kinds = {unicodedata.category(c) for c in shown if c not in "\n\t"}
    assert not kinds & {"Cc", "Cf", "Cs", "Zl", "Zp"}
    shown.encode()


@given(ANY_TEXT)
def test_html_has_no_tags_and_loses_nothing(value):
    found = str(part("about", value)).removeprefix('<p class="about">').removesuffix("</p>")
    assert not set(found) & set("<>\"'")
    assert html.unescape(found) == text(value)


@given(st.recursive(ANY_TEXT | st.integers() | st.none(), st.lists, max_leaves=5))
def test_script_json_cannot_close_the_element_and_loses_nothing(value):
    found = script_json(value)
    assert not set(found) & set("<>&") and found.isascii()
    assert json.loads(found) == value


def test_long_text_keeps_its_ends_and_states_what_is_omitted():
    shown = text("a" * 500 + "b" * 500, 100)
    assert shown.startswith("a" * 75 + "\n") and shown.endswith("\n" + "b" * 25)
    assert "900 characters omitted" in shown
    assert text("a" * 100, 100) == "a" * 100
