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
    logprobs: dict[str, Any] | None = None
    """Log-probabilities of its tokens in OpenAI's format; None if they are not asked for."""


Kind = Literal["chat", "text"]
"""Whether a request is for a turn of a chat or for the continuation of a text."""
_OBJECTS = {"chat": "chat.completion", "text": "text_completion"}


def answer_body(
    kind: Kind, identity: str, answers: Sequence[Answer], usage: dict[str, Any]
) -> dict[str, Any]:
    """Return an answer as one object."""
    choices = [_choice(kind, index, answer) for index, answer in enumerate(answers)]
    return {**_envelope(_OBJECTS[kind], identity), "choices": choices, "usage": usage}


class Events:
    """Writes an answer as server-sent events, piece by piece."""

    def __init__(self, kind: Kind, identity: str, num_choices: int, with_usage: bool) -> None:
        name = "chat.completion.chunk" if kind == "chat" else _OBJECTS[kind]
        self._kind = kind
        self._envelope = _envelope(name, identity) | ({"usage": None} if with_usage else {})
        self._sent = [""] * num_choices

    def begin(self) -> str:
        """Return the events that begin the choices of a chat."""
        if self._kind == "text":
            return ""
        delta = {"delta": {"role": "assistant", "content": ""}}
        return "".join(self._event(index, delta) for index in range(len(self._sent)))

    def piece(self, index: int, text: str) -> str:
        """Return the event of the next piece of a choice's text."""
        self._sent[index] += text
        fields = {"text": text} if self._kind == "text" else {"delta": {"content": text}}
        return self._event(index, fields)

    def end(self, answers: Sequence[Answer], usage: dict[str, Any] | None) -> Iterator[str]:
        """Yield the events of what was not sent yet, and of the end."""
        empty: dict[str, Any] = {"text": ""} if self._kind == "text" else {"delta": {}}
        for index, answer in enumerate(answers):
            rest = answer.content.removeprefix(self._sent[index])
            # A parser may drop space that was sent already.
            if rest and answer.content.startswith(self._sent[index]):
                yield self.piece(index, rest)
            calls = [{"index": i, **call} for i, call in enumerate(answer.tool_calls)]
            if calls:
                yield self._event(index, {"delta": {"tool_calls": calls}})
            last = {"finish_reason": answer.finish_reason, "logprobs": answer.logprobs}
            yield self._event(index, {**empty, **last})
        if usage is not None:
            yield _event({**self._envelope, "choices": [], "usage": usage})
        yield "data: [DONE]\n\n"

    def _event(self, index: int, fields: dict[str, Any]) -> str:
        choice = {"index": index, "finish_reason": None, "logprobs": None, **fields}
        return _event({**self._envelope, "choices": [choice]})


def error_event(body: dict[str, Any]) -> str:
    """Return the event of an error in the middle of a stream."""
    return _event(body)


def token_logprobs(kind: Kind, tokens: Sequence[str], logprobs: Sequence[float]) -> dict[str, Any]:
    """Return log-probabilities in OpenAI's format."""
    if kind == "text":
        offsets = [sum(map(len, tokens[:i])) for i in range(len(tokens))]
        names = {"tokens": list(tokens), "token_logprobs": list(logprobs)}
        return {**names, "top_logprobs": None, "text_offset": offsets}
    content = [
        {"token": t, "logprob": p, "bytes": list(t.encode()), "top_logprobs": []}
        for t, p in zip(tokens, logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def models_body() -> dict[str, Any]:
    """Return the list of models."""
    return {"object": "list", "data": [model_body(MODEL)]}


def model_body(name: str) -> dict[str, Any]:
    """Return the description of a model."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "torchtune-async-grpo"}


def _envelope(name: str, identity: str) -> dict[str, Any]:
    return {"id": identity, "object": name, "created": int(time.time()), "model": MODEL}


def _choice(kind: Kind, index: int, answer: Answer) -> dict[str, Any]:
    choice = {"index": index, "finish_reason": answer.finish_reason, "logprobs": answer.logprobs}
    return {**choice, **({"message": _message(answer)} if kind == "chat" else _text(answer))}


def _message(answer: Answer) -> dict[str, Any]:
    content = None if answer.tool_calls and not answer.content else answer.content
    message: dict[str, Any] = {"role": "assistant", "content": content}
    return {**message, **({"tool_calls": answer.tool_calls} if answer.tool_calls else {})}


def _text(answer: Answer) -> dict[str, Any]:
    return {"text": answer.content}


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"
