"""Reads requests for a turn of a chat: what is honoured, what changes nothing, what is refused.

A request may not change the distribution that tokens are sampled from: the trainer computes their
log-probabilities under that of the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_MOST_CHOICES, _MOST_STOPS, _MOST_STOP_CHARS = 128, 64, 1000
_HONOURED = {
    *("model", "messages", "tools", "tool_choice", "n", "stop", "max_tokens"),
    *("max_completion_tokens", "temperature", "stream", "stream_options", "seed"),
    "chat_template_kwargs",
}
_WITHOUT_EFFECT = {
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
"""Values that leave the distribution and the answer as they are."""
_TAKEN = ("conversation", "tools", "chat_template", "tokenize", "return_tensors", "return_dict")
"""Arguments of the tokenizer that are no variables of a template."""


class RequestError(ValueError):
    """Raised for a request that cannot be answered; the client gets it in OpenAI's format."""

    def __init__(
        self, message: str, parameter: str | None = None, *, status: int = 400, code: Any = None
    ) -> None:
        super().__init__(message)
        self.parameter, self.status, self.code = parameter, status, code

    def body(self) -> dict[str, Any]:
        """Return the error as clients expect it."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        fields = {"message": str(self), "type": kinds.get(self.status, kind)}
        return {"error": {**fields, "param": self.parameter, "code": self.code}}


@dataclass(frozen=True)
class ChatRequest:
    """What a request asks for."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    """Tools that the policy may call; empty with `tool_choice: none`."""
    template_arguments: dict[str, Any]
    num_choices: int
    stop: tuple[str, ...]
    """Texts before which an answer ends."""
    max_tokens: int | None
    """Longest answer in tokens; None for as long as there is room."""
    seed: int | None
    """Repeats the answer of an equal request of the session; None for another one each time."""
    stream: bool
    include_usage: bool
    """Whether a stream ends with the numbers of tokens."""


def read_chat(
    body: Mapping[str, Any], temperature: float, *, any_temperature: bool, has_parser: bool
) -> ChatRequest:
    """Check a request for a turn of a chat."""
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        if name in _HONOURED or name in _WITHOUT_EFFECT:
            continue
        if name not in _NEUTRAL:
            raise RequestError(f"{name}: not supported; allowed: leave it out", name)
        neutral = _NEUTRAL[name]
        same = [isinstance(value, bool) == isinstance(each, bool) for each in neutral]
        if not any(kind and value == each for kind, each in zip(same, neutral, strict=True)):
            raise _refused(name, value, f"leave it out, or {neutral[0]!r}")
    asked = given.get("temperature", temperature)
    if not any_temperature and asked != temperature:
        where = f"{temperature:g}, that of the run (generator.temperature)"
        raise _refused("temperature", asked, f"leave it out, or {where}")
    options, stream = given.get("stream_options", {}), given.get("stream", False)
    if not isinstance(stream, bool):
        raise _refused("stream", stream, "true, false")
    if not isinstance(options, dict):
        raise _refused("stream_options", options, "an object")
    variables = given.get("chat_template_kwargs", {})
    if not isinstance(variables, dict) or any(name in _TAKEN for name in variables):
        allowed = f"an object without {', '.join(_TAKEN)}"
        raise _refused("chat_template_kwargs", variables, allowed)
    return ChatRequest(
        messages=_messages(given.get("messages")),
        tools=_tools(given, has_parser),
        template_arguments=variables,
        num_choices=_whole(given, "n", 1, _MOST_CHOICES) or 1,
        stop=_stops(given.get("stop", ())),
        max_tokens=_whole(given, "max_completion_tokens", 1) or _whole(given, "max_tokens", 1),
        seed=_whole(given, "seed", 0),
        stream=stream,
        include_usage=options.get("include_usage") is True,
    )


def _refused(name: str, value: Any, allowed: str) -> RequestError:
    return RequestError(f"{name}: {value!r:.60} given; allowed: {allowed}", name)


def _messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages: none given; allowed: a list of messages", "messages")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _refused("messages", message, "objects with a role")
    return messages


def _tools(given: Mapping[str, Any], has_parser: bool) -> list[dict[str, Any]]:
    tools, choice = given.get("tools", []), given.get("tool_choice", "auto")
    if not isinstance(tools, list) or not all(
        isinstance(tool, dict) and isinstance(tool.get("function"), dict) for tool in tools
    ):
        raise _refused("tools", tools, "a list of functions")
    if choice not in ("auto", "none"):  # another one would be sampled from a grammar
        raise _refused("tool_choice", choice, "auto, none")
    if tools and not has_parser:
        problem = "tools: given, but environment.tool_parser is null"
        raise RequestError(f"{problem}; allowed: none, or set the model's parser", "tools")
    return tools if choice == "auto" else []


def _whole(body: Mapping[str, Any], name: str, least: int, most: int = 2**63 - 1) -> int | None:
    value = body.get(name)
    if value is not None and (type(value) is not int or not least <= value <= most):
        limit = "" if most == 2**63 - 1 else f", at most {most}"
        raise _refused(name, value, f"a whole number of at least {least}{limit}")
    return value


def _stops(given: Any) -> tuple[str, ...]:
    stops = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, list) else ()
    if (given and not stops) or not all(isinstance(stop, str) and stop for stop in stops):
        raise _refused("stop", given, "a text, or a list of them")
    if len(stops) > _MOST_STOPS or any(len(stop) > _MOST_STOP_CHARS for stop in stops):
        allowed = f"at most {_MOST_STOPS} texts of at most {_MOST_STOP_CHARS} characters"
        raise RequestError(f"stop: too many or too long; allowed: {allowed}", "stop")
    return stops
