"""Checks data against Python types; errors say where it is wrong and what is allowed there."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

from pydantic import InstanceOf, TypeAdapter, ValidationError, WrapValidator
from pydantic_core import InitErrorDetails, PydanticCustomError

AnyText = InstanceOf[str]
"""Type of any string. Pydantic's `str` refuses half a surrogate pair, which JSON allows."""
_KEY_PROBLEMS = {"missing": "missing", "extra_forbidden": "unknown", "invalid_key": "unknown"}
T = TypeVar("T")


def described_as(what: str) -> WrapValidator:
    """Return an annotation: a type's errors say that `what` is allowed; the innermost one wins."""

    def read(value: Any, check: Callable[[Any], Any]) -> Any:
        place, problem = (), ""
        try:
            return check(value)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            if "what" in first.get("ctx", ()):
                raise
            if problem := _KEY_PROBLEMS.get(first["type"], ""):
                place = first["loc"]
        except (TypeError, ArithmeticError):  # from a conversion; pydantic does not catch them
            pass
        kind = PydanticCustomError("refused", "{what}", {"what": what, "problem": problem})
        details = InitErrorDetails(type=kind, loc=place, input=value)
        raise ValidationError.from_exception_data("", [details])

    return WrapValidator(read)


def fits(value: Any, shape: Any) -> bool:
    """Return whether a value fits a type; a dictionary may have more keys than its TypedDict."""
    return _adapter(shape).validator.isinstance_python(value, strict=True)


@cache
def _adapter(shape: Any) -> TypeAdapter[Any]:
    return TypeAdapter(shape)


def read_as(shape: TypeAdapter[T], value: Any, section: str) -> T:
    """Parse a config section as a type; raise a one-line ValueError that says where it is wrong."""
    try:
        return shape.validate_python(value)
    except ValidationError as error:
        first: Any = error.errors(include_url=False)[0]
        place = ".".join(map(str, (section, *first["loc"])))
        problem = first["ctx"]["problem"] or f"{first['input']!r} given"
        raise ValueError(f"{place}: {problem}; allowed: {first['msg']}") from None
