"""Links an agent's requests that continue each other, and joins them into trajectories."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grpo_components.agents.chat import Chat


@dataclass(eq=False)
class Choice:
    """One answer that the policy sampled."""

    token_ids: NDArray[np.int64]
    """[R] sampled tokens, up to and including the one that completes a stop string, if any."""
    logprobs: NDArray[np.float32]
    """[R] log-probability of each token, in nats."""
    versions: NDArray[np.int32]
    """[R] policy version that sampled each token."""
    finish_reason: str
    """stop or length."""
    text: str
    """Text of the tokens."""
    num_sampled: int
    """Number of tokens that the engine sampled, including those after the answer's end."""
    content: str
    """Text that the client gets, without the stop string or end of turn."""
    content_tokens: int
    """Number of leading tokens whose text is exactly `content`; 0 if there is no such number."""
    continued: bool = False
    """Whether a later call continues this answer."""

    def drop_end(self) -> None:
        """Drop the tokens after `content`, such as a stop string: a later prompt omits them."""
        size = self.content_tokens
        self.token_ids, self.logprobs = self.token_ids[:size], self.logprobs[:size]
        self.versions, self.text = self.versions[:size], self.content


@dataclass(eq=False)
class Call:
    """One request of the agent, with the policy's answers."""

    prompt_text: str
    prompt_ids: list[int]
    parent: tuple[Call, Choice] | None = None
    """Earlier call and answer with which this prompt begins, token for token; None if none."""
    key: tuple[int, str, int] = (0, "", 0)
    """Prompt length, hash of the request, and number of equal requests before. A replay has the
    same keys, even if parallel requests arrive in another order."""
    choices: list[Choice] = field(default_factory=list)
    delivered: bool = False
    """Whether the client got the answer; only then it is trained, and may be continued."""
    cached_tokens: int = 0
    """Tokens of the prompt whose keys and values were in the engine's prefix cache."""

    @property
    def path(self) -> list[tuple[Call, Choice]]:
        """The calls and answers that the call continues, from the conversation's first call on."""
        path, step = [], self.parent
        while step is not None:
            path.append(step)
            step = step[0].parent
        return path[::-1]


SessionPart = tuple[NDArray[np.int64], list[tuple[Any, ...]], str]
"""One trajectory of a session: prompt ids [P], turns, and finish reason. A turn is (token ids,
logprobs, versions) of the policy, or (token ids,) between two answers."""


class Conversation:
    """Keeps sampled answers as token ids, and lets later calls continue from these tokens.

    If the text of a prompt begins with an earlier prompt and its answer, only the rest of the text
    is tokenized. If the prompt omits the end of that answer (a stop string, an end of turn), the
    tokens of the end are dropped from the record. Any other prompt is tokenized as a whole, and
    begins a trajectory of its own.
    """

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self.calls: list[Call] = []

    def place(self, text: str) -> Call:
        """Build the call for a prompt; `parent` ends the longest conversation that it continues."""
        best, end, earlier = None, -1, set[int]()
        # The latest first, so that few tool calls are compared.
        for call, choice in reversed([*self._answers()]):
            if id(choice) not in earlier and text.startswith(call.prompt_text):
                begin = len(call.prompt_text)
                length = self._length_of(choice, text[begin:], end - begin)
                if length is not None and begin + length >= end:
                    best, end = (call, choice), begin + length
                    earlier = {id(step[1]) for step in call.path}  # its prompt contains them
        if best is not None:
            call, choice = best
            kept = choice.token_ids.tolist()
            if text[len(call.prompt_text) : end] == choice.content != choice.text:
                kept = kept[: choice.content_tokens]
            known = [*call.prompt_ids, *kept]
            added = self._chat.encode_after(known, text[end:])
            if added is not None:
                return Call(text, [*known, *added], best)
        return Call(text, self._chat.encode_prompt(text))

    def add(self, call: Call) -> None:
        """Record a call; if its prompt omits the end of the answer it continues, drop that end."""
        self.calls.append(call)
        if call.parent is not None:
            before, choice = call.parent
            choice.continued = True
            begin, ids = len(before.prompt_ids), choice.token_ids.tolist()
            if call.prompt_ids[begin : begin + len(ids)] != ids:
                choice.drop_end()

    def _length_of(self, choice: Choice, text: str, least: int) -> int | None:
        """Return the length of an answer, or of its content, at the start of a text; else None."""
        length = self._chat.turn_length(text, choice.text, least)
        if length is None and choice.content_tokens and not choice.continued:
            return len(choice.content) if text.startswith(choice.content) else None
        return length

    def parts(self) -> list[SessionPart]:
        """Return the session's trajectories; each delivered token is in exactly one of them."""
        continued = {id(call.parent[1]) for call, _ in self._answers() if call.parent is not None}
        ends = [(call, choice) for call, choice in self._answers() if id(choice) not in continued]
        paths = [[*call.path, (call, choice)] for call, choice in ends]
        order = {id(choice): number for number, (_, choice) in enumerate(self._answers())}
        paths.sort(key=lambda path: [order[id(choice)] for _, choice in path])
        used: set[int] = set()
        parts: list[SessionPart] = []
        for path in paths:
            new = [step for step in path if id(step[1]) not in used]
            used |= {id(choice) for _, choice in new}
            parts.append(_joined(new))
        return parts

    def _answers(self) -> Iterator[tuple[Call, Choice]]:
        """Yield delivered answers in an order that a replay repeats, however requests arrive."""
        for call in sorted(self.calls, key=lambda call: call.key):
            if call.delivered:
                yield from ((call, choice) for choice in call.choices)


def _joined(steps: list[tuple[Call, Choice]]) -> SessionPart:
    """Join answers into a trajectory; its prompt is all that precedes the first answer."""
    prompt_ids = steps[0][0].prompt_ids
    end, known, turns = len(prompt_ids), [], list[tuple[Any, ...]]()
    for call, choice in steps:
        assert call.prompt_ids[end - len(known) : end] == known, "the policy saw other tokens"
        turns.append((call.prompt_ids[end:],))
        turns.append((choice.token_ids, choice.logprobs, choice.versions))
        known = choice.token_ids.tolist()
        end = len(call.prompt_ids) + len(known)
    return np.array(prompt_ids, np.int64), turns, steps[-1][1].finish_reason
