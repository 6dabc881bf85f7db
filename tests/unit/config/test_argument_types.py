"""Text where a signature has a number, and the like, is refused by the argument's name."""

from collections.abc import Callable

import pytest

from grpo_components.config.argument_types import check_types


class Component:
    def __init__(
        self,
        rate: float,
        *,
        count: int = 1,
        text: str | None = None,
        flag: bool = False,
        either: "int | str" = 1,
        items: list[int] | None = None,
        free=None,
        other: Callable | float = 1.0,
        **rest: int,
    ) -> None: ...


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *(("rate", "x"), ("rate", True), ("rate", [1.0]), ("rate", {"a": 1}), ("count", "1")),
        *(("text", -1), ("text", ["a"]), ("flag", 1), ("flag", "true"), ("either", [1])),
        *(("items", "1"), ("items", {"a": 1})),
    ],
)
def test_a_value_of_another_kind_is_refused(name, wrong):
    with pytest.raises(ValueError, match=rf"^model\.{name}: .* given; allowed: "):
        check_types("model", Component, {"_component_": "x", name: wrong})


def test_what_a_signature_allows_or_does_not_say_is_let_through():
    for given in (
        {"rate": 1, "count": 2.0, "text": "a", "flag": True, "either": "x", "items": [1]},
        {"rate": 1e-3, "text": None, "free": [1], "other": "x", "items": None},
    ):
        check_types("model", Component, given)


def test_a_schedule_may_stand_where_the_schema_has_one():
    def optimizer(params, lr: float = 1.0, eps: float = 1.0): ...

    schedule = {"schedule": "constant", "start": 1}
    check_types("optimizer", optimizer, {"lr": schedule})
    with pytest.raises(ValueError, match=r"^optimizer\.eps: .* given; allowed: a number$"):
        check_types("optimizer", optimizer, {"eps": schedule})


def test_null_is_refused_where_a_signature_has_a_value_and_no_number_is_nan():
    with pytest.raises(ValueError, match=r"^model\.count: null given; allowed: a number$"):
        check_types("model", Component, {"count": None})
    with pytest.raises(ValueError, match=r"^model\.free: nan given; allowed: a number$"):
        check_types("model", Component, {"free": float("nan")})


def test_functions_and_what_cannot_be_looked_into():
    def builder(norm_eps: float = 1e-6): ...

    with pytest.raises(ValueError, match=r"^model\.norm_eps: 'x' given; allowed: a number$"):
        check_types("model", builder, {"norm_eps": "x"})
    builder.__annotations__["norm_eps"] = "NoSuchName"
    check_types("model", builder, {"norm_eps": "x"})
    check_types("model", print, {"sep": 1})
