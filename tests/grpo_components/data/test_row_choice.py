"""Filters keep what they say, and the parts of a partition are disjoint and cover everything."""

import math
import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_components.data.row_choice import Partition, RowFilters
from grpo_components.data.rows import Row

QUESTIONS = st.text(st.characters(exclude_categories=["Cs"]))


@given(question=QUESTIONS, cuts=st.lists(st.integers(1, 12), max_size=4), parts=st.just(12))
def test_parts_that_share_none_share_no_question_and_all_of_them_have_every_one(
    question, cuts, parts
):
    edges = sorted({0, parts, *cuts})
    sides = [Partition(f"{a + 1}-{b}/{parts}") for a, b in pairwise(edges)]
    assert sum(side(question) for side in sides) == 1


def test_parts_are_about_as_large_as_they_say_and_the_same_ever_after():
    questions = [f"What is {number} + 1?" for number in range(2000)]
    last = [question for question in questions if Partition("10/10")(question)]
    assert 150 < len(last) < 250
    assert last[:3] == ["What is 52 + 1?", "What is 61 + 1?", "What is 68 + 1?"]


@pytest.mark.parametrize(
    "text",
    ["", "1", "0/10", "11/10", "3-2/10", "1-11/10", "1/0", "1 / 2", "-1/3", "1.5/3", "0-1/3"],
)
def test_a_partition_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match=r"dataset\.partition: .* allowed: parts of all parts"):
        Partition(text)


def kept(filters, **values):
    return RowFilters(filters)(Row(values, "rows.csv, row 3", {}))


@given(level=st.integers(-9, 9) | st.floats(-9, 9), low=st.integers(-5, 5), high=st.integers(-5, 5))
def test_bounds_are_themselves_allowed_and_a_csv_files_numbers_are_texts(level, low, high):
    filters = {"level": {"min": low, "max": high}}
    assert kept(filters, level=level) == kept(filters, level=str(level)) == (low <= level <= high)


def test_a_row_is_kept_that_meets_all_conditions():
    filters = {"kind": {"allowed": ["algebra", None]}, "problem": {"regex": r"(?s)^(?!.*\[asy\])"}}
    assert kept(filters, kind="algebra", problem="x + 1")
    assert kept(filters, kind=None, problem="")
    assert not kept(filters, kind="geometry", problem="x + 1")
    assert not kept(filters, kind="algebra", problem="see\n[asy] here")
    assert not kept(filters, kind="algebra", problem=None)
    assert not kept({"level": {"min": 1}}, level=None)


@pytest.mark.parametrize(
    ("filters", "values", "problem"),
    [
        ({"level": {"min": 1}}, {}, "rows.csv, row 3: has no field level"),
        (
            {"level": {"min": 1}},
            {"level": "hard"},
            "rows.csv, row 3, field level: 'hard' is no num",
        ),
        ({"level": {"regex": "1"}}, {"level": 1}, "rows.csv, row 3, field level: 1 is no text"),
    ],
)
def test_a_row_that_cannot_be_judged_is_named(filters, values, problem):
    with pytest.raises(ValueError, match=re.escape(problem)):
        kept(filters, **values)


@pytest.mark.parametrize(
    ("conditions", "problem"),
    [
        ({}, "dataset.filters.level: {} given; allowed: one or more of allowed, min, max, regex"),
        (5, "dataset.filters.level: 5 given"),
        ({"most": 5}, "dataset.filters.level.most: unknown condition; allowed: one or more of"),
        ({"min": "5"}, "dataset.filters.level.min: '5' given; allowed: a number"),
        ({"min": math.nan}, "dataset.filters.level.min: nan given; allowed: a number"),
        ({"max": True}, "dataset.filters.level.max: True given; allowed: a number"),
        ({"allowed": "5"}, "dataset.filters.level.allowed: '5' given; allowed: a list of values"),
        ({"regex": "("}, "dataset.filters.level.regex: '(' is no regular expression"),
    ],
)
def test_a_filter_that_is_none_is_refused_by_its_key(conditions, problem):
    with pytest.raises(ValueError, match=re.escape(problem)):
        RowFilters({"level": conditions})
