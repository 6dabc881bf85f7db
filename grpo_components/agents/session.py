"""One session of an agent: answers its requests with the policy, and keeps what was sampled."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from grpo_components.agents.answers import Answer, Kind, answer_body, answer_events
from grpo_components.agents.calls import (
    Call,
    CallTree,
    Choice,
    Place,
    SessionPart,
    decode_after,
    partial_length,
)
from grpo_components.agents.chat import Chat
from grpo_components.agents.requests import (
    RequestError,
    SamplingRequest,
    read_messages,
    read_sampling,
    read_tools,
)
from grpo_components.agents.rewards import checked_reward


@dataclass(frozen=True, kw_only=True)
class SessionLimits:
    """Limits of a session, and what it samples with."""

    max_calls: int
    """Most requests of one session."""
    max_model_len: int
    """Longest prompt plus answer, in tokens."""
    max_response_tokens: int
    """Longest conversation after its first prompt, in tokens."""
    temperature: float
    """Sampling temperature."""
    any_temperature: bool
    """Whether requests may name another temperature, which is not used."""


class Session:
    """Answers the requests of one agent; all calls come from the server's event loop.

    Args:
        name: name of the sample, in errors and in the engine's schedule.
        chat: converts between messages, text and tokens.
        submit: function of prompt ids, `max_tokens`, `seed`, `stop_token_ids` and `name`; returns
            the future of a `Completion`.
        seed_of: function of whole numbers that returns the seed of a choice.
        limits: limits of the session.
    """

    def __init__(
        self,
        name: str,
        chat: Chat,
        submit: Callable[..., Future[Any]],
        seed_of: Callable[..., int],
        limits: SessionLimits,
    ) -> None:
        self.name, self.key = name, f"sk-{secrets.token_urlsafe(24)}"
        self.address = secrets.token_hex(8)
        self._chat, self._submit, self._seed_of, self._limits = chat, submit, seed_of, limits
        self._tree = CallTree(chat)
        self._equal: Counter[str] = Counter()
        """Requests so far, by digest."""
        self._num_requests = 0
        self.closed = False
        self.failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done if the session cannot go on: why; `error` is what was raised, if anything was."""
        self.error: Exception | None = None
        self.reward: Any = None
        """Reward that the agent posted; None without one."""
        self.transcript: list[dict[str, Any]] = []
        """Messages of the last chat that was answered, with the answer."""
        self.last_text, self.finish_reason = "", "stop"
        """The last answer, and why it ended."""

    async def answer(self, kind: Kind, body: Mapping[str, Any]) -> tuple[Call, str]:
        """Sample the answer to a request.

        Args:
            kind: kind of the request.
            body: JSON object of the request.

        Returns:
            The call, for `deliver`; and the answer, as JSON or as a stream of events.

        Raises:
            RequestError: the request cannot be answered.
        """
        self._count()
        limits = self._limits
        request = read_sampling(body, limits.temperature, any_temperature=limits.any_temperature)
        tools: list[dict[str, Any]] = []
        if kind == "chat":
            tools = read_tools(body, self._chat.parse is not None)
            arguments = body.get("chat_template_kwargs") or {}
            text = self._chat.render(read_messages(body), tools, arguments)
            place = self._tree.place(text)
        else:
            text, place = self._continued(body.get("prompt"))
        room = self._room(place, request)
        digest = _digest(place.prompt_ids, request, room, tools)
        key = digest, self._equal[digest]
        self._equal[digest] += 1
        call = self._tree.add(key, text, place)
        await self._sample(call, request, room)
        answers = [self._read(call, index, tools) for index in range(len(call.choices))]
        if kind == "chat":
            self._keep_transcript(body["messages"], answers[-1])
        self.last_text, self.finish_reason = answers[-1].content, call.choices[-1].finish_reason
        identity = f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{digest[:16]}-{key[1]}"
        usage = _usage(call)
        if not request.stream:
            return call, json.dumps(answer_body(kind, identity, answers, usage))
        shown = usage if request.include_usage else None
        return call, "".join(answer_events(kind, identity, answers, shown))

    def deliver(self, call: Call) -> None:
        """Note that the client is there to get the answer to a call."""
        for choice in call.choices:
            choice.delivered = not self.closed

    def post_reward(self, body: Mapping[str, Any]) -> None:
        """Keep the reward that the agent posts.

        Args:
            body: JSON object with `reward`, see `checked_reward`.

        Raises:
            RequestError: it is none.
        """
        try:
            self.reward = checked_reward(body.get("reward"))
        except ValueError as error:
            raise RequestError(str(error), "reward") from error

    def fail(self, why: str, error: Exception | None = None) -> None:
        """End the session: its sample has failed."""
        if not self.failure.done():
            self.error = error
            self.failure.set_result(why)

    def parts(self) -> list[SessionPart]:
        """Return the session's trajectories; none if no answer was delivered."""
        return self._tree.parts()

    def facts(self) -> dict[str, Any]:
        """Return what the record says of the session, for its first trajectory."""
        tree = self._tree
        return {
            "calls": len(tree.calls),
            "trajectories": len(tree.parts()),
            "sampled_tokens": tree.sampled_tokens,
            "forks": tree.forks,
        }

    def _count(self) -> None:
        self._num_requests += 1
        if self._num_requests > self._limits.max_calls:
            problem = f"the agent opened more than {self._limits.max_calls} calls"
            self.fail(f"{problem} (environment.max_calls)")
            raise RequestError(problem, status=429)

    def _continued(self, prompt: Any) -> tuple[str, Place]:
        """Return text and place of the prompt of a request for a completion."""
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, str) and prompt:
            return prompt, self._tree.place(prompt)
        if isinstance(prompt, list) and prompt and all(type(i) is int and i >= 0 for i in prompt):
            return self._chat.decode(prompt), self._tree.place_ids(prompt)
        problem = f"prompt: {prompt!r:.60} given"
        raise RequestError(f"{problem}; allowed: one text, or one list of token ids", "prompt")

    def _room(self, place: Place, request: SamplingRequest) -> int:
        """Return how many tokens an answer may have."""
        size, limits = len(place.prompt_ids), self._limits
        context = size if place.parent is None else place.parent[0].context
        used = size - context
        rooms = {
            f"generator.max_model_len is {limits.max_model_len}": limits.max_model_len - size,
            f"generator.max_response_tokens is {limits.max_response_tokens}": (
                limits.max_response_tokens - used
            ),
        }
        limit = min(rooms, key=lambda name: rooms[name])
        if rooms[limit] < 1:
            has = f"the prompt has {size} tokens, {used} of them after the conversation's first one"
            raise RequestError(f"{has}; {limit}", "messages", code="context_length_exceeded")
        return min(rooms[limit], request.max_tokens or rooms[limit])

    async def _sample(self, call: Call, request: SamplingRequest, room: int) -> None:
        """Sample the choices of a call, and cut them at its stops."""
        stops = self._stop_ids(request.stop)
        _, digest, occurrence = call.key
        depth, above = 1, call.parent
        while above is not None:
            depth, above = depth + 1, above[0].parent
        name = f"{self.name} call {depth}:{digest[:12]}"
        try:
            sampled = [
                self._submit(
                    call.prompt_ids,
                    max_tokens=room,
                    seed=self._seed_of(int(digest[:15], 16), occurrence, request.seed, index),
                    stop_token_ids=[*self._chat.stop_token_ids, *stops],
                    name=name if index == 0 else f"{name} choice {index}",
                )
                for index in range(request.num_choices)
            ]
            found = await asyncio.gather(*map(asyncio.wrap_future, sampled))
        except Exception as error:  # of the engine or of a replay: the agent cannot go on
            self.fail(f"call {call.number}: {error}", error)
            raise RequestError(f"the policy cannot answer: {error}", status=500) from error
        call.choices = [self._cut(call, completion, request.stop) for completion in found]

    def _stop_ids(self, stop: Sequence[str]) -> list[int]:
        """Return the stops that are one token, so that the engine ends there."""
        encoded = [self._chat.encode(text) for text in stop]
        return [ids[0] for ids in encoded if len(ids) == 1]

    def _cut(self, call: Call, completion: Any, stop: Sequence[str]) -> Choice:
        """Make a choice of what the engine sampled, up to the token that completes a stop."""
        ids = completion.token_ids

        def decode(first: Sequence[int]) -> str:
            return decode_after(self._chat, call.prompt_ids, first)

        text, size, reason = decode(ids.tolist()), len(ids), completion.finish_reason
        content = text.removesuffix(self._chat.stop_text(text))
        if found := _first_stop(text, stop):
            content, end = text[: found[0]], found[0] + len(found[1])
            size = min(partial_length(decode, ids.tolist(), end - 1) + 1, len(ids))
            text, reason = decode(ids[:size].tolist()), "stop"
        fits = partial_length(decode, ids.tolist(), len(content))
        return Choice(
            *(ids[:size], completion.logprobs[:size], completion.token_versions[:size]),
            *(reason, text, len(ids), content),
            content_tokens=fits if decode(ids[:fits].tolist()) == content else 0,
        )

    def _read(self, call: Call, index: int, tools: Sequence[Mapping[str, Any]]) -> Answer:
        """Return a choice as the client gets it."""
        choice = call.choices[index]
        if not tools:
            return Answer(choice.content, [], choice.finish_reason)
        turn = self._chat.parse(choice.content, tools)
        calls = [
            {
                # Not random: a template may show it, and a replay must repeat it.
                "id": f"call_{call.key[1][:16]}_{call.key[2]}_{index}_{number}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for number, (name, arguments) in enumerate(turn.calls)
        ]
        return Answer(turn.content, calls, "tool_calls" if calls else choice.finish_reason)

    def _keep_transcript(self, messages: Sequence[Mapping[str, Any]], answer: Answer) -> None:
        said: dict[str, Any] = {"role": "assistant", "content": answer.content}
        if answer.tool_calls:
            said["tool_calls"] = answer.tool_calls
        self.transcript = [*map(dict, messages), said]


def _digest(
    prompt_ids: Sequence[int],
    request: SamplingRequest,
    room: int,
    tools: Sequence[Mapping[str, Any]],
) -> str:
    """Return a fingerprint of what is sampled: the same for an equal request in a replay."""
    asked = [list(prompt_ids), request.num_choices, request.stop, room, request.seed, bool(tools)]
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()


def _first_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Return place and text of the stop that comes first in a text; None if none does."""
    found = [(text.find(stop), stop) for stop in stops if stop in text]
    return min(found, default=None)


def _usage(call: Call) -> dict[str, int]:
    prompt, sampled = len(call.prompt_ids), sum(choice.num_sampled for choice in call.choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
    }
