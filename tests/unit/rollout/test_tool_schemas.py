"""The schemas of tools come from their signatures and docstrings, in the form of chat templates."""

import pytest

from grpo_components.rollout.tool_schemas import tool_schemas
from grpo_components.rollout.tools import ToolUse, calculator, python_tool


def search(query: str, limit: int = 3, exact: bool = False) -> str:
    """Find pages.

    Args:
        query: words to look for.
        limit: most pages to return.
        exact: whether the order of the words counts.
    """
    return f"{query}{limit}{exact}"


def bare(text: str, times: int = 2, other=None, **rest: int) -> str:
    return text * times


def test_a_documented_tool_is_described_with_its_arguments():
    (schema,) = tool_schemas({"find": search})
    assert schema["type"] == "function" and next(iter(schema["function"])) == "name"
    function = schema["function"]
    assert (function["name"], function["description"]) == ("find", "Find pages.")
    parameters = function["parameters"]
    assert parameters["required"] == ["query"]
    assert parameters["properties"]["query"] == {
        "type": "string",
        "description": "words to look for.",
    }
    kinds = {name: each["type"] for name, each in parameters["properties"].items()}
    assert kinds == {"query": "string", "limit": "integer", "exact": "boolean"}


def test_without_a_docstring_the_annotations_remain():
    (schema,) = tool_schemas({"bare": bare})
    assert schema["function"]["parameters"] == {
        "type": "object",
        "properties": {"text": {"type": "string"}, "times": {"type": "integer"}, "other": {}},
        "required": ["text"],
    }


@pytest.mark.parametrize("tool", [calculator, python_tool(lambda program: program)])
def test_our_tools_are_described_whole(tool):
    (schema,) = ToolUse({"mine": tool}).tool_schemas
    function = schema["function"]
    assert function["name"] == "mine" and function["description"]
    ((_, argument),) = function["parameters"]["properties"].items()
    assert argument["type"] == "string" and argument["description"]
