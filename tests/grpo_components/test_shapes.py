"""Errors about the shape of data name the wrong place and what is allowed there."""

from typing import Annotated

import pytest
from pydantic import BeforeValidator, ConfigDict, TypeAdapter, with_config
from typing_extensions import TypedDict

from grpo_components.shapes import AnyText, described_as, fits, read_as


@with_config(ConfigDict(strict=True, extra="forbid"))
class Inner(TypedDict):
    text: Annotated[AnyText, described_as("a text")]
    number: Annotated[int, BeforeValidator(int), described_as("a whole number")]


SHAPE = TypeAdapter(Annotated[list[Annotated[Inner, described_as("both")]], described_as("a list")])
GOOD = {"text": "\ud800", "number": "3"}


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ([GOOD | {"text": 1}], "key.0.text: 1 given; allowed: a text"),
        ([GOOD, GOOD | {"number": None}], "key.1.number: None given; allowed: a whole number"),
        ([GOOD | {"number": float("inf")}], "key.0.number: inf given; allowed: a whole number"),
        ([GOOD | {"more": 1}], "key.0.more: unknown; allowed: both"),
        ([{"number": 1}], "key.0.text: missing; allowed: both"),
        ([5], "key.0: 5 given; allowed: both"),
        (5, "key: 5 given; allowed: a list"),
    ],
)
def test_the_innermost_description_of_a_wrong_value_is_shown(value, problem):
    assert not fits(SHAPE, value)
    with pytest.raises(ValueError) as refused:
        read_as(SHAPE, value, "key")
    assert str(refused.value) == problem


def test_without_a_section_an_error_shows_no_value():
    for value, problem in ((5, "allowed: a list"), ([5], "0: allowed: both")):
        with pytest.raises(ValueError, match=f"^{problem}$"):
            read_as(SHAPE, value)


def test_a_value_that_fits_is_returned_as_its_type_reads_it():
    assert fits(SHAPE, [GOOD])
    assert read_as(SHAPE, [GOOD]) == [GOOD | {"number": 3}]
