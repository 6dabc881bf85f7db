"""One session of an agent: answers its requests with the policy, and records the answers."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from grpo_components.agents.chat import Chat
from grpo_components.agents.conversation import Call, Choice, Conversation, SessionPart
from grpo_components.agents.requests import ChatRequest, RequestError
from grpo_components.agents.rewards import checked_reward
from grpo_components.settings import GeneratorSettings

_MOST_CHARACTERS = 16
"""Maximum characters of a prompt per token of `max_model_len`; texts of any language have fewer."""
_MOST_BYTES = 4
"""Maximum number of tokens that one character may take."""
_SLACK = 16
"""Maximum number of tokens that one step of the engine may add."""


@dataclass(frozen=True)
class Answer:
    """The answer to a request; the policy is trained on it only if the client receives it."""

    call: Call
    request: ChatRequest
    body: dict[str, Any]
    """The answer in OpenAI's format."""

    def events(self) -> str:
        """Write the answer as a stream of server-sent events: each choice in one piece."""
        chunk = {**self.body, "object": "chat.completion.chunk"}
        usage = chunk.pop("usage")
        chunk |= {"usage": None} if self.request.include_usage else {}
        chunks = [{**chunk, "choices": [_delta(choice)]} for choice in self.body["choices"]]
        if self.request.include_usage:
            chunks.append({**chunk, "choices": [], "usage": usage})
        return "".join(f"data: {each}\n\n" for each in [*map(json.dumps, chunks), "[DONE]"])


class Session:
    """Answers and records the requests of one agent; only the server's event loop may call it."""

    def __init__(
        self,
        name: str,
        chat: Chat,
        submit: Callable[..., Future[Any]],
        seed_of: Callable[..., int],
        read: Callable[[Mapping[str, Any]], ChatRequest],
        settings: GeneratorSettings,
        max_calls: int,
    ) -> None:
        self.name, self.key = name, f"sk-{secrets.token_urlsafe(24)}"
        self.address = secrets.token_hex(8)
        self._chat, self._submit, self._seed_of = chat, submit, seed_of
        self._read, self._max_calls = read, max_calls
        self._max_model_len = settings.max_model_len or 0
        self._max_response_tokens = settings.max_response_tokens
        self._sampling: set[asyncio.Task[None]] = set()
        """Tasks that sample answers, also for clients that have disconnected."""
        self._conversation = Conversation(chat)
        self._equal: Counter[str] = Counter()
        """Number of requests so far, by their hash (see `_digest`)."""
        self._num_requests = 0
        self.closed = False
        self.failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Set to the reason if the session cannot continue; `error`: the exception, or None."""
        self.error: Exception | None = None
        self.reward: dict[str, float] | None = None
        """Rewards by name that the agent posted; None without any."""
        self.transcript: list[dict[str, Any]] = []
        """Messages of the last chat that was answered, answer included."""
        self.last_text, self.finish_reason = "", "stop"
        """The last answer, and why it ended."""

    async def answer(self, body: Mapping[str, Any]) -> Answer:
        """Sample the policy's answer to a request, whose JSON object is `body`."""
        self._num_requests += 1
        if self._num_requests > self._max_calls:
            problem = f"the agent opened more than {self._max_calls} calls"
            self._fail(f"{problem} (environment.max_calls)")
            raise RequestError(problem, status=429)
        request = self._read(body)
        text = self._chat.render(request.messages, request.tools, request.template_arguments)
        if len(text) > self._max_model_len * _MOST_CHARACTERS:  # tokenizing would delay all
            has = f"the prompt has {len(text)} characters; generator.max_model_len is"
            problem = f"{has} {self._max_model_len}, with at most {_MOST_CHARACTERS} a token"
            raise RequestError(problem, "messages", code="context_length_exceeded")
        call = self._conversation.place(text)
        room = self._room(call, request)
        digest = _digest(call, request, room)
        call.key = len(call.prompt_ids), digest, self._equal[digest]
        self._equal[digest] += 1
        self._conversation.add(call)
        # A task of its own ends, whatever becomes of the client.
        sampling = asyncio.create_task(self._sample(call, request, room))
        self._sampling.add(sampling)
        try:
            await sampling
            choices = [self._choice(call, request, i) for i in range(request.num_choices)]
        except Exception as error:  # whatever the reason: an agent cannot go on without its answer
            kind = "" if isinstance(error, RuntimeError) else f"{type(error).__name__}: "
            self._fail(f"call {self._conversation.calls.index(call) + 1}: {kind}{error}", error)
            raise RequestError(f"the policy cannot answer: {error}", status=500) from error
        identity = f"chatcmpl-{digest[:16]}-{call.key[2]}"
        fields = {"id": identity, "created": int(time.time()), "model": "policy"}
        content = {"object": "chat.completion", "choices": choices, "usage": _usage(call)}
        return Answer(call, request, {**fields, **content})

    def deliver(self, answer: Answer) -> None:
        """Mark an answer as received by the client, so that the policy is trained on it."""
        if self.closed:
            return
        answer.call.delivered = True
        last = answer.body["choices"][-1]["message"]
        self.transcript = [*map(dict, answer.request.messages), last]
        self.last_text, self.finish_reason = last["content"], answer.call.choices[-1].finish_reason

    async def settle(self) -> None:
        """Wait until all sampling has ended, so that the record is complete."""
        await asyncio.gather(*self._sampling, return_exceptions=True)

    def post_reward(self, body: Mapping[str, Any]) -> None:
        """Keep the `reward` that the agent posts, see `checked_reward`."""
        try:
            self.reward = checked_reward(body.get("reward"))
        except ValueError as error:
            raise RequestError(str(error), "reward") from error

    @property
    def has_equal_requests(self) -> bool:
        """Whether some requests were equal: a replay can confuse them if they arrive together."""
        return any(count > 1 for count in self._equal.values())

    def parts(self) -> list[SessionPart]:
        """Return the session's trajectories; none if no answer was delivered."""
        return self._conversation.parts()

    def facts(self) -> dict[str, int]:
        """Return counts of the session's calls and tokens, to record with its first trajectory."""
        calls = self._conversation.calls
        answers = [(call, choice) for call in calls for choice in call.choices]
        return {
            "calls": len(calls),
            "trajectories": len(self.parts()),
            "sampled_tokens": sum(choice.num_sampled for _, choice in answers),
            "unanswered_tokens": sum(  # counted answer by answer, not as what is left over
                choice.num_sampled - call.delivered * len(choice.token_ids)
                for call, choice in answers
            ),
            "prompt_tokens": sum(len(call.prompt_ids) for call in calls),
            "cached_tokens": sum(call.cached_tokens for call in calls),
        }

    def _fail(self, why: str, error: Exception | None = None) -> None:
        """Set `failure`: the agent is then ended, and this response counts as failed."""
        if not self.failure.done():
            self.error = error
            self.failure.set_result(why)

    def _room(self, call: Call, request: ChatRequest) -> int:
        """Return how many tokens the answer to a call may have; raise a `RequestError` if none."""
        size = len(call.prompt_ids)
        used = size - len(call.path[0][0].prompt_ids) if call.parent else 0
        room, limit = min(
            (self._max_model_len - size, f"max_model_len is {self._max_model_len}"),
            (
                self._max_response_tokens - used,
                f"max_response_tokens is {self._max_response_tokens}",
            ),
        )
        if room < 1:
            has = f"the prompt has {size} tokens, {used} of them after the conversation's first one"
            problem = f"{has}; generator.{limit}"
            raise RequestError(problem, "messages", code="context_length_exceeded")
        return min(room, request.max_tokens or room)

    async def _sample(self, call: Call, request: ChatRequest, room: int) -> None:
        _, digest, occurrence = call.key
        # An equal request gets another answer, unless it names its seed.
        own = (occurrence, 0) if request.seed is None else (0, request.seed + 1)
        name = f"{self.name} call {len(call.path) + 1}:{digest[:12]}"
        futures = [
            self._submit(
                call.prompt_ids,
                max_tokens=room,
                seed=self._seed_of(int(digest[:15], 16), *own, index),
                stop_token_ids=self._chat.stop_token_ids,
                name=f"{name} choice {index}" if index else name,
                watch=partial(self._has_stop, request.stop) if request.stop else None,
            )
            for index in range(request.num_choices)
        ]
        found = await asyncio.gather(*map(asyncio.wrap_future, futures))
        call.cached_tokens = found[0].cached_tokens
        call.choices = [self._cut(call, completion, request.stop) for completion in found]

    def _has_stop(self, stops: Sequence[str], token_ids: Sequence[int]) -> bool:
        """Whether the last tokens contain a stop string; the engine calls this after each step."""
        size = (max(map(len, stops)) + 1) * _MOST_BYTES + _SLACK
        text = self._chat.decode(token_ids[-size:])
        return any(stop in text for stop in stops)

    def _cut(self, call: Call, completion: Any, stops: Sequence[str]) -> Choice:
        """Build an answer from sampled tokens; cut it after the token that ends a stop string."""
        ids: list[int] = completion.token_ids.tolist()

        @cache
        def decode(size: int) -> str:
            return self._chat.decode_after(call.prompt_ids, ids[:size])

        text, size, reason = decode(len(ids)), len(ids), completion.finish_reason
        while any(stop in (shorter := decode(size - 1)) for stop in stops):
            text, size = shorter, size - 1
        content = text.removesuffix(self._chat.stop_text(text))
        if places := [text.find(stop) for stop in stops if stop in text]:
            content, reason = text[: min(places)], "stop"
        fits = above = size  # a long stop string has many tokens: do not decode for each of them
        while len(decode(fits)) > len(content):
            fits, above = max(0, 2 * fits - size - 1), fits
        fits += bisect_right(range(fits + 1, above), len(content), key=lambda n: len(decode(n)))
        return Choice(
            *(completion.token_ids[:size], completion.logprobs[:size]),
            *(completion.token_versions[:size], reason, text, len(ids), content),
            content_tokens=fits if decode(fits) == content else 0,
        )

    def _choice(self, call: Call, request: ChatRequest, index: int) -> dict[str, Any]:
        """Return answer number `index` of a call in OpenAI's format, with its tool calls parsed."""
        choice = call.choices[index]
        content, reason, called = choice.content, choice.finish_reason, []
        if request.tools:
            content, called = self._chat.parse(choice.content, request.tools)
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if called:
            # Not random: a template may show the id, and a replay must repeat it.
            identity = f"call_{call.key[1][:16]}_{call.key[2]}_{index}"
            named = [{"name": name, "arguments": arguments} for name, arguments in called]
            message["tool_calls"] = [
                {"id": f"{identity}_{i}", "type": "function", "function": function}
                for i, function in enumerate(named)
            ]
            reason = "tool_calls"
        return {"index": index, "finish_reason": reason, "logprobs": None, "message": message}


def _delta(choice: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a choice from OpenAI's format for whole answers to the format for streams."""
    message = dict(choice["message"])
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
    return {**{k: v for k, v in choice.items() if k != "message"}, "delta": message}


def _digest(call: Call, request: ChatRequest, room: int) -> str:
    """Return a hash of a request; an equal request in a replay has the same hash."""
    asked = [request.num_choices, request.stop, room, request.seed, bool(request.tools)]
    return hashlib.sha256(json.dumps([call.prompt_ids, *asked]).encode()).hexdigest()


def _usage(call: Call) -> dict[str, Any]:
    prompt, sampled = len(call.prompt_ids), sum(choice.num_sampled for choice in call.choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": call.cached_tokens},
    }
