"""Reads plain values into `Settings`; the first wrong value becomes a one-line error."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import cache
from typing import Any, NoReturn

from pydantic import ValidationError

from grpo_components.errors import ConfigError, fail, shown
from grpo_components.settings import Settings

_MISSING: Any = object()
_JsonSchema = dict[str, Any]
_WORDS = {"boolean": "true | false", "string": "text", "null": "null", "array": "a list"}
_NUMBERS = {"integer": "a whole number", "number": "a number"}
_LIMITS = {"exclusiveMinimum": "above", "minimum": "at least", "maximum": "at most"}


def read_settings(given: Mapping[str, Any]) -> Settings:
    """Check types, bounds and names of all keys, and fill in the defaults.

    A reward that is null is left out: so a command line removes one, `rewards.format=null`.
    """
    rewards = given.get("rewards")
    if isinstance(rewards, Mapping):
        left = {name: node for name, node in rewards.items() if node is not None}
        given = {**given, "rewards": left}
    try:
        return Settings.model_validate(given)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        unknown = (each for each in errors if each["type"] == "extra_forbidden")
        _refuse(given, next(unknown, errors[0]))


def _refuse(given: Mapping[str, Any], error: Mapping[str, Any]) -> NoReturn:
    """Raise our one-line error for an item of `ValidationError.errors()`."""
    kind, context = error["type"], error.get("ctx", {})
    if isinstance(own := context.get("error"), ConfigError):  # a validator of ours raised it
        raise own
    is_unknown = kind == "extra_forbidden"
    names, schemas = _find(error["loc"][:-1] if is_unknown else error["loc"])
    prefix = "".join(f"{name}." for name in names)
    if is_unknown:
        name = str(error["loc"][-1])
        keys = [key for schema in schemas for key in schema.get("properties", ())]
        fail(f"{prefix}{name}", "unknown key", nearest(name, keys, prefix))
    allowed = _join(map(_allowed, schemas))
    if kind.startswith("union_tag"):  # a schedule of unknown kind
        names.append(context["discriminator"].strip("'"))
        allowed = context.get("expected_tags", "constant, linear, cosine").replace("'", "")
    value: Any = given
    for name in names:
        value = value.get(name, _MISSING) if isinstance(value, Mapping) else _MISSING
    problem = "missing" if value is _MISSING else f"{shown(value)} given"
    if kind == "invalid_key" or "[key]" in error["loc"]:
        problem, allowed = "a key that is not text", "text as a key"
    why = f", but {error['msg']}" if kind == "refused" else ""
    fail(".".join(map(str, names)), problem + why, allowed)


def nearest(name: str, keys: Iterable[str], prefix: str = "") -> str:
    """Return a hint: the key that was probably meant, or else the keys that exist."""
    keys = list(dict.fromkeys(keys))
    if near := get_close_matches(name, keys, n=1, cutoff=0.75):
        return f"did you mean {prefix}{near[0]}?"
    whole = _json_schema()["properties"]
    anywhere = {
        leaf: f"{key}.{leaf}"
        for key in reversed(whole)
        for schema in _alternatives(whole[key])
        for leaf in schema.get("properties", ())
        if leaf != "_component_"
    }
    anywhere |= {key: key for key in whole}
    anywhere = {leaf: key for leaf, key in anywhere.items() if key != f"{prefix}{name}"}
    if near := get_close_matches(name, anywhere, n=1, cutoff=0.8):
        return f"did you mean {anywhere[near[0]]}?"
    return ", ".join(keys) or "none" if prefix else "the keys that `tune cat tiny_async_grpo` shows"


@cache
def _json_schema() -> _JsonSchema:
    return Settings.model_json_schema()


def _alternatives(schema: _JsonSchema) -> list[_JsonSchema]:
    """Return the members of a union schema, else the schema itself; references are followed."""
    if "$ref" in schema:
        return _alternatives(_json_schema()["$defs"][schema["$ref"].rpartition("/")[2]])
    union = schema.get("anyOf") or schema.get("oneOf")
    return [part for each in union for part in _alternatives(each)] if union else [schema]


def _find(location: Iterable[str | int]) -> tuple[list[Any], list[_JsonSchema]]:
    """Return the names of the keys that lead to an error, and the schemas allowed there."""
    names: list[Any] = []
    schemas = [_json_schema()]
    for part in location:
        inner = [s["properties"][part] for s in schemas if part in s.get("properties", ())]
        inner += [s["additionalProperties"] for s in schemas if "minProperties" in s]  # rewards
        if inner:
            names.append(part)
            schemas = _alternatives(inner[0])
        else:  # tag of a union's member, or index of a list item
            schemas = [s for s in schemas if part in _shapes(s)] or schemas
    return names, schemas


def _shapes(schema: _JsonSchema) -> list[str]:
    """Return the values that the key `schedule` can have in this schema."""
    named = schema.get("properties", {}).get("schedule", {})
    return named.get("enum", [named.get("const")])


def _allowed(schema: _JsonSchema) -> str:
    if "allowed" in schema:
        return schema["allowed"]
    if choices := schema.get("enum", [schema["const"]] if "const" in schema else []):
        return " | ".join(choices)
    if schema["type"] in _NUMBERS:
        form = "d" if schema["type"] == "integer" else ".10g"
        bounds = [f"{word} {schema[k]:{form}}" for k, word in _LIMITS.items() if k in schema]
        return f"{_NUMBERS[schema['type']]} {' and '.join(bounds)}"
    if names := schema.get("items", {}).get("enum"):
        return f"a list of {', '.join(names)}"
    if schema["type"] != "object":
        return _WORDS[schema["type"]]
    if "minProperties" in schema:
        return "one `_component_` or more, each under a name"
    if "properties" not in schema:
        return "a mapping with any keys"
    if "_component_" in schema["properties"]:
        return "`_component_` and its arguments"
    is_schedule = "schedule" in schema["properties"]
    return "a schedule" if is_schedule else f"a mapping with {', '.join(schema['properties'])}"


def _join(words: Iterable[str]) -> str:
    return ", or ".join(dict.fromkeys(words))
