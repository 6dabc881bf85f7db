"""Finds tool calls in the text of a turn, with vLLM's parser for the model's own format."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers import ToolParserManager


class Turn(NamedTuple):
    """A turn of the policy."""

    content: str
    """Text that is no call of a tool."""
    calls: list[tuple[str, str]]
    """Name and arguments, as JSON text, of each call."""


class TurnParser:
    """Parses the turns of a policy."""

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
        """Parse a turn."""
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
        """Whether two texts are the same turn with calls, up to the spelling of its JSON."""
        turns = [self(text, [_ANY_TOOL]) for text in (one, other)]
        contents, calls = [t.content.strip() for t in turns], [_values(t.calls) for t in turns]
        return bool(turns[0].calls) and contents[0] == contents[1] and calls[0] == calls[1]


_ANY_TOOL = {"type": "function", "function": {"name": "any", "parameters": {}}}


def _values(calls: Sequence[tuple[str, str]]) -> list[tuple[str, Any]]:
    return [(name, json_value(arguments)) for name, arguments in calls]


def json_value(text: str) -> Any:
    """Return the value of a JSON text; the text itself if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
