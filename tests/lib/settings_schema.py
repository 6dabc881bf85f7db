"""Every key of the settings, with the JSON schemas of what it may hold."""

from collections.abc import Iterator
from typing import Any

from grpo_components.settings import Settings

SCHEMA = Settings.model_json_schema()


def leaves(schema: dict[str, Any] = SCHEMA, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each dotted key with one schema; a key of several kinds comes once for each."""
    if "$ref" in schema:
        yield from leaves(SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]], prefix)
    elif union := schema.get("anyOf") or schema.get("oneOf"):
        for part in union:
            yield from leaves(part, prefix)
    elif "minProperties" in schema:
        yield from leaves(schema["additionalProperties"], f"{prefix}correctness.")
    elif "properties" in schema:
        for name, part in schema["properties"].items():
            yield from leaves(part, f"{prefix}{name}.")
    else:
        yield prefix[:-1], schema
