"""Writes chat messages as a prompt, and finds the policy's earlier turns in a prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_components.agents.requests import RequestError
from grpo_components.data.prompts import reads_parts
from grpo_components.errors import ConfigError

PLAIN = "plain"
"""Name of the template that writes the contents of all messages one after the other."""
_PLAIN_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
_BEFORE = 8
"""Number of earlier tokens decoded along with a text: some tokenizers drop a leading space."""


class Chat:
    """Converts chat messages to the text of a prompt, and text to token ids and back."""

    def __init__(
        self,
        tokenizer: Any,
        template: str | None,
        stop_token_ids: Sequence[int],
        parse: Any = None,
        beginning: Sequence[int] = (),
    ) -> None:
        self._tokenizer, self.parse = tokenizer, parse
        self._beginning = list(beginning) if template == PLAIN else []  # other templates write it
        self._template = _template_text(tokenizer, template)
        self._in_parts = reads_parts(self._template)
        self.stop_token_ids = list(stop_token_ids)
        self._stops = [self.decode([token_id]) for token_id in stop_token_ids]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any],
    ) -> str:
        """Write messages as the next turn's prompt; `arguments`: values of template variables."""
        try:
            text = self._tokenizer.apply_chat_template(
                [self._for_template(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                chat_template=self._template,
                tokenize=False,
                **{"add_generation_prompt": True, **arguments},
            )
            text.encode()  # arguments of a tool call may have half of a surrogate pair
            return text
        except RequestError:
            raise
        except Exception as error:  # a template is a program and may raise anything
            what = "the chat template cannot write these messages"
            raise RequestError(f"{what}: {type(error).__name__}: {error}", "messages") from error

    def encode_prompt(self, text: str) -> list[int]:
        """Tokenize a prompt; with template `plain`, add the model's beginning token, if any."""
        return [*self._beginning, *self.encode(text)]

    def encode(self, text: str) -> list[int]:
        """Tokenize a text; a control token's name, such as `<|im_end|>`, becomes that token."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, control tokens included."""
        kept = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return self._tokenizer.decode(list(token_ids), **kept)

    def decode_after(self, before: Sequence[int], token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids` alone, decoded as they stand after the tokens `before`."""
        tail = list(before[-_BEFORE:])
        return self.decode([*tail, *token_ids])[len(self.decode(tail)) :]

    def encode_after(self, before: Sequence[int], text: str) -> list[int] | None:
        """Tokenize a text that follows the tokens `before`; None if decoding gives another text."""
        found = self.encode(text)
        return found if self.decode_after(before, found) == text else None

    def stop_text(self, turn: str) -> str:
        """Return the text of the stop token that ends a turn; empty if no stop token ends it."""
        return next((stop for stop in self._stops if turn.endswith(stop)), "")

    def turn_length(self, text: str, turn: str, least: int) -> int | None:
        """Return how many characters `turn` takes at the start of a text; None if it is not there.

        A beginning that differs from `turn` only in the JSON formatting of tool calls counts, too,
        if it has at least `least` characters. The caller then keeps the policy's formatting.
        """
        if text.startswith(turn):
            return len(turn)
        stop = self.stop_text(turn)
        end = text.find(stop) if stop else -1
        if self.parse is None or end < 0 or end + len(stop) < least:
            return None
        return end + len(stop) if self.parse.same(turn.removesuffix(stop), text[:end]) else None

    def _for_template(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Convert a message for the template: drop fields that are None, parse calls' arguments."""
        written = {name: value for name, value in message.items() if value is not None}
        content = _text_of(written.get("content", ""))
        written["content"] = [{"type": "text", "text": content}] if self._in_parts else content
        if calls := written.pop("tool_calls", None):
            written["tool_calls"] = [_call_for_template(call) for call in calls]
        return written


def _template_text(tokenizer: Any, template: str | None) -> str:
    if template == PLAIN:
        return _PLAIN_TEMPLATE
    allowed = f"null, {PLAIN}, or the path of a file with a Jinja template"
    if template is None:
        if tokenizer.chat_template:
            return tokenizer.get_chat_template()
        problem = "null given, and the model's tokenizer has no chat template"
        raise ConfigError("environment.chat_template", problem, allowed.removeprefix("null, "))
    try:
        return Path(template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problem = f"{template!r} given, {error}"
        raise ConfigError("environment.chat_template", problem, allowed) from error


def _text_of(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(
        isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content
    ):
        return "".join(part["text"] for part in content)
    problem = f"content: {json.dumps(content)[:80]} given; allowed: a text, or parts with texts"
    raise RequestError(problem, "messages")


def _call_for_template(call: Any) -> dict[str, Any]:
    try:
        function = dict(call["function"])
        arguments = function.get("arguments", "")
        if isinstance(arguments, str):
            function["arguments"] = json.loads(arguments or "{}")
        return {**call, "function": function}
    except (TypeError, KeyError, ValueError, RecursionError) as error:
        problem = f"tool_calls: {call!r:.80} given; allowed: a function with JSON arguments"
        raise RequestError(problem, "messages") from error
