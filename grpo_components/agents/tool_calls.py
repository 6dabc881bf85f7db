"""Finds tool calls in the text of a turn, with vLLM's parser for the model's own format."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers import ToolParserManager


class Turn(NamedTuple):
    """A turn of the policy, split into its text and its tool calls."""

    content: str
    """Text outside the tool calls."""
    calls: list[tuple[str, str]]
    """Name and arguments (as JSON text) of each call."""


class TurnParser:
    """Finds the tool calls in the policy's turns."""

    def __init__(self, name: str, tokenizer: Any) -> None:
        try:
            self._parser = ToolParserManager.get_tool_parser(name)
        except KeyError:
            known = ", ".join(sorted(ToolParserManager.list_registered()))
            problem = f"environment.tool_parser: {name!r} given"
            raise ValueError(f"{problem}; allowed: null, {known}") from None
        self._tokenizer = tokenizer
        try:
            self._parser(tokenizer, [])
        except Exception as error:  # a parser may need tokens that the model lacks
            problem = f"{name!r} does not go with the model's tokenizer: {error}"
            raise ValueError(f"environment.tool_parser: {problem}") from error

    def __call__(self, text: str, tools: Sequence[Mapping[str, Any]]) -> Turn:
        """Split a turn into its text and its tool calls."""
        message = [{"role": "user", "content": ""}]
        given: dict[str, Any] = {"model": "policy", "messages": message, "tools": [*tools]}
        request = ChatCompletionRequest(**given)
        parser = self._parser(self._tokenizer, cast(Any, request.tools))
        found = parser.extract_tool_calls(text, request)
        if not found.tools_called:
            return Turn(text, [])
        calls = [(call.function.name, call.function.arguments) for call in found.tool_calls]
        return Turn(found.content or "", calls)

    def same(self, one: str, other: str) -> bool:
        """Whether two turns have tool calls, and differ at most in the formatting of their JSON."""
        first, second = (self(text, [_ANY_TOOL]) for text in (one, other))
        same_text = first.content.strip() == second.content.strip()
        return bool(first.calls) and same_text and _values(first) == _values(second)


_ANY_TOOL = {"type": "function", "function": {"name": "any", "parameters": {}}}


def _values(turn: Turn) -> list[tuple[str, Any]]:
    return [(name, _json_value(arguments)) for name, arguments in turn.calls]


def _json_value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # the policy may write anything
        return text
