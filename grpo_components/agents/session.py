"""One session of an agent: answers its requests with the policy, and keeps what was sampled."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_components.agents.answers import (
    Answer,
    Events,
    Kind,
    answer_body,
    error_event,
    token_logprobs,
)
from grpo_components.agents.calls import Call, CallTree, Place
from grpo_components.agents.chat import Chat
from grpo_components.agents.parts import SessionPart
from grpo_components.agents.requests import (
    RequestError,
    SamplingRequest,
    read_messages,
    read_sampling,
    read_template_arguments,
    read_tools,
)
from grpo_components.agents.rewards import checked_reward
from grpo_components.agents.sampling import AnswerSampler, Send

_IDS = ("chatcmpl-", "cmpl-")
"""What ids of answers begin with: a chat's, and a text's."""
_MOST_CHARACTERS = 16
"""Characters a token of the longest prompt, on average; text in any language has fewer."""


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


@dataclass(frozen=True)
class _Asked:
    """A request that may be answered."""

    kind: Kind
    request: SamplingRequest
    tools: list[dict[str, Any]]
    messages: list[dict[str, Any]]
    """Messages of a chat; empty for a text."""
    room: int
    """Most tokens of the answer."""
    call: Call


class Session:
    """Answers the requests of one agent; all calls come from the server's event loop."""

    def __init__(
        self, name: str, chat: Chat, sampler: AnswerSampler, limits: SessionLimits
    ) -> None:
        self.name, self.key = name, f"sk-{secrets.token_urlsafe(24)}"
        self.address = secrets.token_hex(8)
        self._chat, self._sampler, self._limits = chat, sampler, limits
        self._sampling: set[asyncio.Task[None]] = set()
        """What is sampled, also for clients that have gone."""
        self._answered: dict[int, tuple[_Asked, list[Answer]]] = {}
        """Number of a call that nobody got yet -> its request and its answers."""
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
        """Sample the answer to a request."""
        asked = self._ask(kind, body)
        await self._begin_sampling(asked, None)
        answers = self._answers(asked)
        call = asked.call
        return call, json.dumps(answer_body(kind, call.identity, answers, _usage(call)))

    async def stream(
        self, kind: Kind, body: Mapping[str, Any], gone: Callable[[], Awaitable[bool]]
    ) -> AsyncIterator[str]:
        """Sample the answer to a request, and yield its server-sent events meanwhile."""
        asked = self._ask(kind, body)
        call, usage = asked.call, asked.request.include_usage
        events = Events(kind, call.identity, asked.request.num_choices, usage)
        pieces: asyncio.Queue[tuple[int, str] | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def send(index: int, text: str) -> None:
            loop.call_soon_threadsafe(pieces.put_nowait, (index, text))

        sampling = self._begin_sampling(asked, send)
        sampling.add_done_callback(lambda _: pieces.put_nowait(None))
        yield events.begin()
        while (piece := await pieces.get()) is not None:
            yield events.piece(*piece)
        try:
            await sampling
            answers = self._answers(asked)
        except RequestError as error:
            yield error_event(error.body())
            return
        if not await gone():
            self.deliver(call)
        for event in events.end(answers, _usage(call) if usage else None):
            yield event

    def deliver(self, call: Call) -> None:
        """Note that the client is there to get the answer to a call."""
        asked, answers = self._answered.pop(call.number)
        if self.closed:
            return
        for choice in call.choices:
            choice.delivered = True
        if asked.kind == "chat":
            self._keep_transcript(asked.messages, answers[-1])
        self.last_text, self.finish_reason = answers[-1].content, call.choices[-1].finish_reason

    async def settle(self) -> None:
        """Wait until nothing is sampled any more, so that the record has all of it."""
        await asyncio.gather(*self._sampling, return_exceptions=True)

    def post_reward(self, body: Mapping[str, Any]) -> None:
        """Keep the reward that the agent posts."""
        identity = body.get("completion")
        try:
            reward = checked_reward(body.get("reward"))
            if identity is None:
                self.reward = reward
            elif not isinstance(identity, str) or not identity.startswith(_IDS):
                raise ValueError(
                    f"completion: {identity!r:.60} given; allowed: the id of an answer"
                )
            else:
                self.reward_calls({identity: (reward or {}).get("reward")})
        except ValueError as error:
            raise RequestError(
                str(error), "reward" if identity is None else "completion"
            ) from error

    def reward_calls(self, rewards: Mapping[Any, Any]) -> dict[str, float]:
        """Give calls their own rewards."""
        calls = {call.identity: call for call in self._tree.calls if call.delivered}
        others: dict[str, float] = {}
        for name, reward in rewards.items():
            if isinstance(name, str) and not name.startswith(_IDS):
                others[name] = reward
            elif not isinstance(name, str) or name not in calls or reward is None:
                problem = f"the reward of the call {name!r:.60} is {reward}"
                raise ValueError(f"{problem}; allowed: a number, for the id of an answer")
            else:
                calls[name].reward = float(reward)
        return others

    @property
    def rewards(self) -> dict[str, float] | None:
        """Rewards of the session that the agent posted; the sum of its calls' if it has none."""
        if self.reward is not None:
            return self.reward
        own = [call.reward for call in self._tree.calls if call.reward is not None]
        return {"reward": sum(own)} if own else None

    def fail(self, why: str, error: Exception | None = None) -> None:
        """End the session: its sample has failed."""
        if not self.failure.done():
            self.error = error
            self.failure.set_result(why)

    @property
    def has_equal_requests(self) -> bool:
        """Whether requests were told apart by nothing but their arrival."""
        return any(count > 1 for count in self._equal.values())

    def parts(self) -> list[SessionPart]:
        """Return the session's trajectories; none if no answer was delivered."""
        return self._tree.parts()

    def facts(self) -> dict[str, Any]:
        """Return what the record says of the session, for its first trajectory."""
        tree, parts = self._tree, self._tree.parts()
        return {
            "calls": len(tree.calls),
            "trajectories": len(parts),
            "sampled_tokens": tree.sampled_tokens,
            "unanswered_tokens": tree.unanswered_tokens,
            "prompt_tokens": sum(len(call.prompt_ids) for call in tree.calls),
            "cached_tokens": sum(call.cached_tokens for call in tree.calls),
            "retokenized": tree.retokenized,
            "drift": sum(part.drift for part in parts),
            "forks": tree.forks,
        }

    def _ask(self, kind: Kind, body: Mapping[str, Any]) -> _Asked:
        """Check a request, and find its place among the calls."""
        self._count()
        limits = self._limits
        request = read_sampling(body, limits.temperature, any_temperature=limits.any_temperature)
        tools: list[dict[str, Any]] = []
        messages: list[dict[str, Any]] = []
        if kind == "chat":
            tools, messages = read_tools(body, self._chat.parse is not None), read_messages(body)
            text = self._chat.render(messages, tools, read_template_arguments(body))
            self._check_length(text)
            place = self._tree.place(text)
        else:
            text, place = self._continued(body.get("prompt"))
        room = self._room(place, request)
        digest = _digest(place.prompt_ids, request, room, tools)
        key = digest, self._equal[digest]
        self._equal[digest] += 1
        call = self._tree.add(key, text, place)
        call.identity = f"{_IDS[kind != 'chat']}{digest[:16]}-{key[1]}"
        return _Asked(kind, request, tools, messages, room, call)

    def _begin_sampling(self, asked: _Asked, send: Send | None) -> asyncio.Task[None]:
        """Sample in a task of its own: it ends, whatever becomes of the client."""
        task = asyncio.create_task(self._sample(asked, send))
        self._sampling.add(task)
        return task

    async def _sample(self, asked: _Asked, send: Send | None) -> None:
        call, tools = asked.call, bool(asked.tools)
        try:
            await self._sampler.sample(call, asked.request, asked.room, send, tools)
        except Exception as error:  # whatever the reason: an agent cannot go on without its answer
            kind = "" if isinstance(error, RuntimeError) else f"{type(error).__name__}: "
            self.fail(f"call {call.number}: {kind}{error}", error)
            raise RequestError(f"the policy cannot answer: {error}", status=500) from error

    def _answers(self, asked: _Asked) -> list[Answer]:
        """Return the choices as the client gets them, and keep them for `deliver`."""
        try:
            answers = [self._read(asked, index) for index in range(len(asked.call.choices))]
        except Exception as error:  # a parser is a program of vLLM's and may raise anything
            problem = f"the tool parser fails: {type(error).__name__}: {error}"
            self.fail(f"call {asked.call.number}: {problem}")
            raise RequestError(problem, status=500) from error
        self._answered[asked.call.number] = asked, answers
        return answers

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
        if isinstance(prompt, list) and prompt and all(map(self._chat.is_token, prompt)):
            return self._chat.decode(prompt), self._tree.place_ids(prompt)
        problem = f"prompt: {prompt!r:.60} given"
        allowed = "one text, or one list of token ids of the policy"
        raise RequestError(f"{problem}; allowed: {allowed}", "prompt")

    def _check_length(self, text: str) -> None:
        """Refuse what is certainly too long: to tokenize it would hold up all sessions."""
        limit = self._limits.max_model_len
        if len(text) > limit * _MOST_CHARACTERS:
            has = f"the prompt has {len(text)} characters; generator.max_model_len is {limit}"
            problem = f"{has}, with at most {_MOST_CHARACTERS} characters a token"
            raise RequestError(problem, "messages", code="context_length_exceeded")

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

    def _read(self, asked: _Asked, index: int) -> Answer:
        """Return a choice as the client gets it."""
        call, choice = asked.call, asked.call.choices[index]
        logprobs = None
        if asked.request.logprobs:
            size = choice.content_tokens or len(choice.token_ids)
            tokens = [self._chat.decode([one]) for one in choice.token_ids[:size].tolist()]
            logprobs = token_logprobs(asked.kind, tokens, choice.logprobs[:size].tolist())
        if not asked.tools:
            return Answer(choice.content, [], choice.finish_reason, logprobs)
        turn = self._chat.parse(choice.content, asked.tools)
        calls = [
            {
                # Not random: a template may show it, and a replay must repeat it.
                "id": f"call_{call.key[1][:16]}_{call.key[2]}_{index}_{number}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for number, (name, arguments) in enumerate(turn.calls)
        ]
        reason = "tool_calls" if calls else choice.finish_reason
        return Answer(turn.content, calls, reason, logprobs)

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


def _usage(call: Call) -> dict[str, Any]:
    prompt, sampled = len(call.prompt_ids), sum(choice.num_sampled for choice in call.choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": call.cached_tokens},
    }
