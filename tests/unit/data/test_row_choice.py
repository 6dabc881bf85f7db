"""Filters keep the right rows; the parts of a partition are disjoint and cover all rows."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_components.data.row_choice import Partition, RowFilters
from grpo_components.data.rows import Row

QUESTIONS = st.text(st.characters(exclude_categories=["Cs"]))


@given(question=QUESTIONS, cuts=st.lists(st.integers(1, 12), max_size=4), parts=st.just(12))
def test_each_question_is_in_exactly_one_of_several_disjoint_parts(question, cuts, parts):
    edges = sorted({0, parts, *cuts})
    sides = [Partition(f"{a + 1}-{b}/{parts}") for a, b in pairwise(edges)]
    assert sum(side(question) for side in sides) == 1


def test_parts_have_about_the_right_size_and_never_change():
    questions = [f"What is {number} + 1?" for number in range(2000)]
    last = [question for question in questions if Partition("10/10")(question)]
    assert 150 < len(last) < 250
    assert last[:3] == ["What is 52 + 1?", "What is 61 + 1?", "What is 68 + 1?"]


@pytest.mark.parametrize("text", ["", "1", "0/10", "11/10", "3-2/10", "1-11/10"])
def test_a_malformed_partition_is_refused(text):
    with pytest.raises(ValueError, match=r"^dataset\.partition: "):
        Partition(text)


def kept(filters, **values):
    return RowFilters(filters)(Row(values, "rows.csv, row 3", None))


@given(level=st.integers(-9, 9) | st.floats(-9, 9), low=st.integers(-5, 5), high=st.integers(-5, 5))
def test_bounds_are_inclusive_and_numbers_may_be_texts(level, low, high):
    filters = {"level": {"min": low, "max": high}}
    assert kept(filters, level=level) == kept(filters, level=str(level)) == (low <= level <= high)


def test_a_row_that_meets_all_conditions_is_kept():
    filters = {"kind": {"allowed": ["algebra", None]}, "problem": {"regex": r"(?s)^(?!.*\[asy\])"}}
    assert kept(filters, kind="algebra", problem="x + 1")
    assert kept(filters, kind=None, problem="")
    assert not kept(filters, kind="geometry", problem="x + 1")
    assert not kept(filters, kind="algebra", problem="see\n[asy] here")
    assert not kept(filters, kind="algebra", problem=None)
    assert not kept({"level": {"min": 1}}, level=None)


def test_a_row_that_a_filter_cannot_read_is_named():
    for conditions, values, place in (
        ({"min": 1}, {"lvel": 1}, r"dataset\.filters\.level: .*row 3: .* did you mean lvel\?$"),
        ({"min": 1}, {"level": "hard"}, "rows.csv, row 3, field level: 'hard'"),
        ({"regex": "1"}, {"level": 1}, "rows.csv, row 3, field level: 1 "),
    ):
        with pytest.raises(ValueError, match=rf"^{place}"):
            kept({"level": conditions}, **values)


def test_a_malformed_filter_is_refused_with_its_key():
    wrong = [{}, {"most": 5}, {"min": "5"}, {"min": math.nan}, {"allowed": "5"}, {"regex": "("}]
    for conditions in wrong:
        key = ".".join(["level", *conditions])
        with pytest.raises(ValueError, match=rf"^dataset\.filters\.{key}: .*; allowed: "):
            RowFilters({"level": conditions})
