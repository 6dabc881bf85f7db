"""Writes answers as OpenAI's clients read them: as one object, or as a stream of events."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

MODEL = "policy"
"""Name of the only model; a request may use any other."""


class Answer(NamedTuple):
    """One choice of an answer."""

    content: str
    tool_calls: list[dict[str, Any]]
    """Tool calls in OpenAI's format."""
    finish_reason: str


Kind = Literal["chat", "text"]
"""Whether a request is for a turn of a chat or for the continuation of a text."""
_OBJECTS = {"chat": "chat.completion", "text": "text_completion"}


def answer_body(
    kind: Kind, identity: str, answers: Sequence[Answer], usage: dict[str, int]
) -> dict[str, Any]:
    """Return an answer as one object.

    Args:
        kind: kind of the request.
        identity: id of the answer.
        answers: its choices.
        usage: numbers of tokens.
    """
    choices = [_choice(kind, index, answer) for index, answer in enumerate(answers)]
    return {**_envelope(_OBJECTS[kind], identity), "choices": choices, "usage": usage}


def answer_events(
    kind: Kind, identity: str, answers: Sequence[Answer], usage: dict[str, int] | None
) -> Iterator[str]:
    """Yield an answer as server-sent events: one for each choice and one for its end.

    Args:
        kind: kind of the request.
        identity: id of the answer.
        answers: its choices.
        usage: numbers of tokens; None leaves them out.
    """
    name = "chat.completion.chunk" if kind == "chat" else _OBJECTS[kind]
    envelope = _envelope(name, identity)
    for index, answer in enumerate(answers):
        for part in _parts(kind, answer):
            choice = {"index": index, "finish_reason": None, "logprobs": None, **part}
            yield _event({**envelope, "choices": [choice]})
    if usage is not None:
        yield _event({**envelope, "choices": [], "usage": usage})
    yield "data: [DONE]\n\n"


def models_body() -> dict[str, Any]:
    """Return the list of models."""
    return {"object": "list", "data": [model_body(MODEL)]}


def model_body(name: str) -> dict[str, Any]:
    """Return the description of a model.

    Args:
        name: name under which the client asked for it.
    """
    return {"id": name, "object": "model", "created": 0, "owned_by": "torchtune-async-grpo"}


def _envelope(name: str, identity: str) -> dict[str, Any]:
    return {"id": identity, "object": name, "created": int(time.time()), "model": MODEL}


def _choice(kind: Kind, index: int, answer: Answer) -> dict[str, Any]:
    choice = {"index": index, "finish_reason": answer.finish_reason, "logprobs": None}
    return {**choice, **({"message": _message(answer)} if kind == "chat" else _text(answer))}


def _message(answer: Answer) -> dict[str, Any]:
    content = None if answer.tool_calls and not answer.content else answer.content
    message: dict[str, Any] = {"role": "assistant", "content": content}
    return {**message, **({"tool_calls": answer.tool_calls} if answer.tool_calls else {})}


def _text(answer: Answer) -> dict[str, Any]:
    return {"text": answer.content}


def _parts(kind: Kind, answer: Answer) -> Iterator[dict[str, Any]]:
    """Yield the fields of a choice in each of its events."""
    if kind == "text":
        yield _text(answer)
        yield {"text": "", "finish_reason": answer.finish_reason}
        return
    message = _message(answer)
    calls = [{"index": i, **call} for i, call in enumerate(message.pop("tool_calls", []))]
    yield {"delta": {**message, **({"tool_calls": calls} if calls else {})}}
    yield {"delta": {}, "finish_reason": answer.finish_reason}


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"
