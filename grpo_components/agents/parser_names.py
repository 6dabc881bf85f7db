"""Names of vLLM's parsers of tool calls, read without importing vLLM, which takes seconds."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

_TABLE = "_TOOL_PARSERS_TO_REGISTER"


def parser_names() -> list[str]:
    """Return the names, sorted; empty if vLLM keeps its table elsewhere.

    The generator asks vLLM itself.
    """
    spec = importlib.util.find_spec("vllm")
    for folder in (spec and spec.submodule_search_locations) or ():
        source = Path(folder, "tool_parsers", "__init__.py")
        if not source.is_file():
            continue
        for node in ast.parse(source.read_text(encoding="utf-8")).body:
            names = [each.id for each in getattr(node, "targets", ()) if isinstance(each, ast.Name)]
            if isinstance(node, ast.Assign) and names == [_TABLE]:
                return sorted(ast.literal_eval(node.value))
    return []
