"""Checks an agent's chat requests: which fields are honoured, ignored or refused.

A request may not change the distribution that tokens are sampled from, because the trainer computes
their log-probabilities under the distribution that the config sets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_MOST_CHOICES, _MOST_STOPS, _MOST_STOP_CHARS = 128, 64, 1000
_HONOURED = {
    *("messages", "tools", "tool_choice", "n", "stop", "max_tokens", "max_completion_tokens"),
    *("temperature", "stream", "stream_options", "seed", "chat_template_kwargs"),
}
_WITHOUT_EFFECT = {
    *("model", "user", "metadata", "store", "service_tier", "safety_identifier"),
    "prompt_cache_key",
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
"""Values that these fields may have, because they change neither the sampling nor the answer."""
_TAKEN = ("conversation", "tools", "chat_template", "tokenize", "return_tensors", "return_dict")
"""Arguments of `apply_chat_template` itself; a request may set only the template's variables."""


class RequestError(ValueError):
    """Raised for a request that cannot be answered; the client gets it in OpenAI's format."""

    def __init__(
        self, message: str, parameter: str | None = None, *, status: int = 400, code: Any = None
    ) -> None:
        super().__init__(message)
        self.parameter, self.status, self.code = parameter, status, code

    def body(self) -> dict[str, Any]:
        """Return the JSON object of the HTTP answer, an error in OpenAI's format."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        fields = {"message": str(self), "type": kinds.get(self.status, kind)}
        return {"error": {**fields, "param": self.parameter, "code": self.code}}


@dataclass(frozen=True)
class ChatRequest:
    """A chat request whose fields are checked, with defaults for the missing ones."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    """Tools that the policy may call; empty with `tool_choice: none`."""
    template_arguments: dict[str, Any]
    num_choices: int
    stop: tuple[str, ...]
    """Stop strings: an answer ends before the first of them."""
    max_tokens: int | None
    """Maximum tokens of an answer; None: as many as there is room for."""
    seed: int | None
    """With a seed, equal requests of a session draw equal random numbers; with None, new ones."""
    stream: bool
    include_usage: bool
    """Whether a stream ends with the token counts."""


def read_chat(
    body: Mapping[str, Any], temperature: float, *, any_temperature: bool, has_parser: bool
) -> ChatRequest:
    """Read a chat request from its JSON object; raise a `RequestError` if it cannot be honoured.

    `any_temperature`: other temperatures than the policy's are allowed, as in evaluations.
    `has_parser`: a parser finds tool calls in answers, so requests may offer tools.
    """
    given = {name: value for name, value in body.items() if value is not None}

    def read(name: str, default: Any, allowed: str, fits: Callable[[Any], Any]) -> Any:
        value = given.get(name, default)
        if name in given and not fits(value):
            raise RequestError(f"{name}: {value!r:.60} given; allowed: {allowed}", name)
        return value

    def whole(name: str, least: int, most: int = 2**63 - 1) -> int | None:
        allowed = f"a whole number of at least {least}, at most {most}"
        return read(name, None, allowed, lambda n: type(n) is int and least <= n <= most)

    for name in given:
        if neutral := _NEUTRAL.get(name):
            read(name, None, f"leave it out, or {neutral[0]!r}", lambda v, n=neutral: v in n)
        elif name not in _HONOURED | _WITHOUT_EFFECT:
            raise RequestError(f"{name}: not supported; allowed: leave it out", name)
    where = f"leave it out, or {temperature:g}, that of the run (generator.temperature)"
    read("temperature", None, where, lambda asked: any_temperature or asked == temperature)
    tools = read("tools", [], "a list of functions", lambda v: _are_objects(v, "function", dict))
    # Any other choice would constrain the sampling by a grammar.
    choice = read("tool_choice", "auto", "auto, none", lambda choice: choice in ("auto", "none"))
    if tools and not has_parser:
        problem = "tools: given, but environment.tool_parser is null"
        raise RequestError(f"{problem}; allowed: none, or set the model's parser", "tools")
    allowed = f"a text, or a list of at most {_MOST_STOPS}, each of at most {_MOST_STOP_CHARS}"
    stop = read("stop", [], f"{allowed} characters", _are_stops)
    variables = f"an object without {', '.join(_TAKEN)}"
    options = read("stream_options", {}, "an object", lambda value: isinstance(value, dict))
    given.setdefault("messages", [])
    return ChatRequest(
        messages=read(
            *("messages", [], "a list of messages, each with a role"),
            lambda value: value and _are_objects(value, "role", str),
        ),
        tools=tools if choice == "auto" else [],
        template_arguments=read(
            *("chat_template_kwargs", {}, variables),
            lambda value: isinstance(value, dict) and value.keys().isdisjoint(_TAKEN),
        ),
        num_choices=whole("n", 1, _MOST_CHOICES) or 1,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        max_tokens=whole("max_completion_tokens", 1) or whole("max_tokens", 1),
        seed=whole("seed", 0),
        stream=read("stream", False, "true, false", lambda value: isinstance(value, bool)),
        include_usage=options.get("include_usage") is True,
    )


def _are_objects(given: Any, name: str, kind: type) -> bool:
    """Whether a value is a list of objects whose field `name` has the type `kind`."""
    return isinstance(given, list) and all(
        isinstance(each, dict) and isinstance(each.get(name), kind) for each in given
    )


def _are_stops(given: Any) -> bool:
    stops = [given] if isinstance(given, str) else given
    return (
        isinstance(stops, list)
        and len(stops) <= _MOST_STOPS
        and all(isinstance(stop, str) and 0 < len(stop) <= _MOST_STOP_CHARS for stop in stops)
    )
