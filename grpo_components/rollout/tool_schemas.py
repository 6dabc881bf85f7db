"""Describes tool functions as JSON schemas, from their signatures and docstrings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

_JSON_TYPES = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    dict: "object",
}


def tool_schemas(tools: Mapping[str, Callable[..., str]]) -> list[dict[str, Any]]:
    """Return the description of each tool as chat templates expect it.

    Descriptions of the tool and of its arguments come from a docstring in Google's format. A tool
    without one is described by its name and the annotations of its arguments.
    """
    return [
        {"type": "function", "function": {**_described(tool), "name": name}}
        for name, tool in tools.items()
    ]


def _described(tool: Callable[..., str]) -> dict[str, Any]:
    from transformers.utils import chat_template_utils  # its import takes seconds

    refused = (
        chat_template_utils.DocstringParsingException,
        chat_template_utils.TypeHintParsingException,
    )
    try:
        found = chat_template_utils.get_json_schema(tool)["function"]
    except (*refused, NameError, TypeError, AttributeError):  # NameError: a type checker's name
        return {"name": "", **_without_docstring(tool)}
    wanted = ("description", "parameters")
    return {"name": "", **{key: found[key] for key in wanted}}  # the name stays in front


def _without_docstring(tool: Callable[..., str]) -> dict[str, Any]:
    try:
        parameters = inspect.signature(tool, eval_str=True).parameters.values()
    except NameError:
        parameters = inspect.signature(tool).parameters.values()
    given = [
        each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    schema = {
        "type": "object",
        "properties": {each.name: _type(each.annotation) for each in given},
        "required": [each.name for each in given if each.default is each.empty],
    }
    text = inspect.cleandoc(tool.__doc__ or "").split("\n\n")[0].replace("\n", " ")
    return {"description": text, "parameters": schema}


def _type(annotation: Any) -> dict[str, str]:
    known = next((name for kind, name in _JSON_TYPES.items() if annotation is kind), None)
    return {"type": known} if known else {}
