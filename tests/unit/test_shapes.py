"""Whether data fits a type; errors name the wrong place and what is allowed there."""

from typing import Annotated

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BeforeValidator, ConfigDict, TypeAdapter, with_config
from typing_extensions import TypedDict

from grpo_components.shapes import AnyText, described_as, fits, read_as

Number = int | float


class StepRecord(TypedDict):
    step: int
    attempt: int


@with_config(ConfigDict(strict=True, extra="forbid"))
class Inner(TypedDict):
    text: Annotated[AnyText, described_as("a text")]
    number: Annotated[int, BeforeValidator(int), described_as("a whole number")]


Shape = Annotated[list[Annotated[Inner, described_as("both")]], described_as("a list")]
SHAPE = TypeAdapter(Shape)
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
    assert not fits(value, Shape)
    with pytest.raises(ValueError) as refused:
        read_as(SHAPE, value, "key")
    assert str(refused.value) == problem


def test_a_value_that_fits_is_returned_as_its_type_reads_it():
    assert fits([GOOD], Shape)
    assert read_as(SHAPE, [GOOD], "key") == [GOOD | {"number": 3}]


TEXTS = st.text(st.characters(exclude_categories=()), max_size=3)  # half a surrogate pair, too
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | TEXTS
NAMES = st.sampled_from(["step", "attempt"]) | TEXTS
VALUES = st.recursive(SCALARS, lambda each: st.lists(each) | st.dictionaries(NAMES, each))


def of(*kinds):
    return lambda value: type(value) in kinds


def list_of(*kinds):
    return lambda value: isinstance(value, list) and all(map(of(*kinds), value))


# Type -> whether a JSON value fits it.
FITS = {
    **{dict: of(dict), str: of(str), int: of(int), Number: of(int, float)},
    float: of(int, float),
    Number | None: of(int, float, type(None)),
    **{list[int]: list_of(int), list[Number]: list_of(int, float)},
    StepRecord: lambda value: (
        isinstance(value, dict) and all(type(value.get(n)) is int for n in ("step", "attempt"))
    ),
}


@given(VALUES | st.lists(SCALARS) | st.fixed_dictionaries({"step": SCALARS, "attempt": SCALARS}))
def test_any_json_value_fits_a_type_or_not(value):
    assert {shape: fits(value, shape) for shape in FITS} == {
        shape: expected(value) for shape, expected in FITS.items()
    }
