"""The agents of the rungs, whose processes import no more than this."""

from __future__ import annotations

from typing import Any

from openai import OpenAI

_FIRST_TOKENS = 4
"""Tokens of the first of two calls."""


def one_call(task: dict[str, Any]) -> None:
    """Ask once, as an agent."""
    _answer(task["prompt_text"])


def two_calls(task: dict[str, Any]) -> None:
    """Ask for the first tokens, and then for the others, as an agent."""
    first = _answer(task["prompt_text"], max_tokens=_FIRST_TOKENS)
    _answer(task["prompt_text"], first)


def _answer(*texts: str, **options: Any) -> str:
    messages: list[Any] = [{"role": "user", "content": text} for text in texts]
    ask = OpenAI().chat.completions.create
    return ask(model="policy", messages=messages, **options).choices[0].message.content or ""
