"""Reads the requests of OpenAI's clients: what is honoured, what changes nothing, what is refused.

A request may not change the distribution that tokens are sampled from: the trainer computes their
log-probabilities under that of the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_MOST_CHOICES, _MOST_STOPS, _MOST_STOP_CHARS = 128, 64, 1000
_HONOURED = {
    *("model", "messages", "prompt", "tools", "tool_choice", "n", "stop", "max_tokens"),
    *("max_completion_tokens", "temperature", "stream", "stream_options", "seed"),
    *("chat_template_kwargs", "logprobs"),
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
    "top_logprobs": (0,),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
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
class SamplingRequest:
    """What a request asks of the sampler."""

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
    logprobs: bool = False
    """Whether the answer has the log-probability of each token."""


def read_sampling(
    body: Mapping[str, Any], temperature: float, *, any_temperature: bool
) -> SamplingRequest:
    """Check a request for an answer, and return what it asks of the sampler."""
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        if name in _HONOURED or name in _WITHOUT_EFFECT:
            continue
        neutral = _NEUTRAL.get(name)
        if neutral is None:
            raise RequestError(f"{name}: not supported; allowed: leave it out", name)
        if not any(type(value) is type(each) and value == each for each in neutral) and not (
            _is_number(value) and value in neutral
        ):
            allowed = f"leave it out, or {neutral[0]!r}"
            raise RequestError(f"{name}: {value!r:.60} given; allowed: {allowed}", name)
    asked = given.get("temperature")
    if asked is not None and not any_temperature and asked != temperature:
        where = f"{temperature:g}, that of the run (generator.temperature)"
        problem = f"temperature: {asked!r:.60} given"
        raise RequestError(f"{problem}; allowed: leave it out, or {where}", "temperature")
    options, stream = given.get("stream_options", {}), given.get("stream", False)
    if not isinstance(stream, bool):
        raise RequestError(f"stream: {stream!r:.60} given; allowed: true, false", "stream")
    if not isinstance(options, dict):
        problem = f"stream_options: {options!r:.60} given"
        raise RequestError(f"{problem}; allowed: an object", "stream_options")
    return SamplingRequest(
        num_choices=_whole(given, "n", 1, _MOST_CHOICES) or 1,
        stop=_stops(given.get("stop", ())),
        max_tokens=_whole(given, "max_completion_tokens", 1) or _whole(given, "max_tokens", 1),
        seed=_whole(given, "seed", 0),
        stream=stream,
        include_usage=options.get("include_usage") is True,
        logprobs=_logprobs(given),
    )


def read_messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a request for a turn of a chat."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages: none given; allowed: a list of messages", "messages")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            problem = f"messages: {message!r:.60} given"
            raise RequestError(f"{problem}; allowed: objects with a role", "messages")
    return messages


def read_template_arguments(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables that a request gives the chat template."""
    given = body.get("chat_template_kwargs") or {}
    if not isinstance(given, dict) or any(name in _TAKEN for name in given):
        problem = f"chat_template_kwargs: {given!r:.60} given"
        allowed = f"an object without {', '.join(_TAKEN)}"
        raise RequestError(f"{problem}; allowed: {allowed}", "chat_template_kwargs")
    return given


def read_tools(body: Mapping[str, Any], has_parser: bool) -> list[dict[str, Any]]:
    """Return the tools that the policy may call; none with `tool_choice: none`."""
    tools, choice = body.get("tools") or [], body.get("tool_choice") or "auto"
    if not isinstance(tools, list) or not all(
        isinstance(tool, dict) and isinstance(tool.get("function"), dict) for tool in tools
    ):
        raise RequestError(f"tools: {tools!r:.60} given; allowed: a list of functions", "tools")
    if choice not in ("auto", "none"):  # another one would be sampled from a grammar
        problem = f"tool_choice: {choice!r:.60} given"
        raise RequestError(f"{problem}; allowed: auto, none", "tool_choice")
    if tools and not has_parser:
        problem = "tools: given, but environment.tool_parser is null"
        raise RequestError(f"{problem}; allowed: none, or set the model's parser", "tools")
    return tools if choice == "auto" else []


def _logprobs(given: Mapping[str, Any]) -> bool:
    """Whether a request asks for log-probabilities: `true` for a chat, 0 for a text."""
    asked = given.get("logprobs", False)
    if asked is True or (asked == 0 and asked is not False):
        return True
    if asked is not False:  # the engine computes no others
        problem = f"logprobs: {asked!r:.60} given"
        allowed = "those of the sampled tokens: true for a chat, 0 for a text"
        raise RequestError(f"{problem}; allowed: {allowed}", "logprobs")
    return False


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _whole(body: Mapping[str, Any], name: str, least: int, most: int = 2**63 - 1) -> int | None:
    value = body.get(name)
    if value is not None and (type(value) is not int or not least <= value <= most):
        limit = "" if most == 2**63 - 1 else f", at most {most}"
        allowed = f"a whole number of at least {least}{limit}"
        raise RequestError(f"{name}: {value!r:.60} given; allowed: {allowed}", name)
    return value


def _stops(given: Any) -> tuple[str, ...]:
    stops = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, list) else ()
    if (given and not stops) or not all(isinstance(stop, str) and stop for stop in stops):
        raise RequestError(f"stop: {given!r:.60} given; allowed: a text, or a list of them", "stop")
    if len(stops) > _MOST_STOPS or any(len(stop) > _MOST_STOP_CHARS for stop in stops):
        allowed = f"at most {_MOST_STOPS} texts of at most {_MOST_STOP_CHARS} characters"
        raise RequestError(f"stop: too many or too long; allowed: {allowed}", "stop")
    return stops
