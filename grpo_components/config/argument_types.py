"""Compares a component's arguments with the types that its signature names."""

from __future__ import annotations

import inspect
import math
import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from grpo_components.errors import fail, shown

_NONE = type(None)
_WORDS = {int: "a number", float: "a number", bool: "true | false", str: "text"}
_WORDS |= {list: "a list", _NONE: "null"}


def check_types(key: str, component: Any, given: Mapping[str, Any]) -> None:
    """Refuse an argument whose plain type is not the one in the component's signature.

    `int` and `float` count as the same type. Arguments without a plain type in the signature pass:
    the component checks them when it is built.
    """
    hints, defaults = _hints(component), _defaults(component)
    for name, value in given.items():
        where, allowed = f"{key}.{name}", _plain(hints.get(name))
        if isinstance(value, float) and math.isnan(value):
            fail(where, "nan given", "a number")
        if name == "_component_" or allowed is None:
            continue
        if value is None and defaults.get(name, _NONE) is None:
            continue  # `x: int = None` is a common slip
        if where == "optimizer.lr" and isinstance(value, Mapping):
            continue  # a schedule, which the recipe applies
        if not any(_is(value, kind) for kind in allowed):
            words = dict.fromkeys(_WORDS[kind] for kind in allowed)
            fail(where, f"{shown(value)} given", " or ".join(words))


def _hints(component: Any) -> dict[str, Any]:
    target = component.__init__ if isinstance(component, type) else component
    try:
        return get_type_hints(target)
    except Exception:  # unknown names, or whatever a user's module raises
        return {}


def _defaults(component: Any) -> dict[str, Any]:
    try:
        parameters = inspect.signature(component).parameters
    except (TypeError, ValueError):  # some builtins have no signature
        return {}
    return {name: parameter.default for name, parameter in parameters.items()}


def _plain(hint: Any) -> set[type] | None:
    """Return the plain types that a hint allows; None if it also allows others."""
    if get_origin(hint) is Literal:
        return {type(choice) for choice in get_args(hint)}
    if get_origin(hint) in (Union, types.UnionType):
        parts = [_plain(part) for part in get_args(hint)]
        return None if None in parts else set().union(*(part for part in parts if part))
    if get_origin(hint) is list or hint is list:
        return {list}
    return {hint} if hint in (int, float, bool, str, _NONE) else None


def _is(value: Any, kind: type) -> bool:
    if kind in (int, float):
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, kind)
