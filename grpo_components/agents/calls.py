"""The calls of one session: which of them continue each other, and the trajectories they make."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_components.agents.choices import Call, Choice, Texts
from grpo_components.agents.parts import SessionPart, credits_of, joined, retokenized


@dataclass(frozen=True)
class Place:
    """Where a prompt belongs among the calls so far."""

    prompt_ids: list[int]
    parent: tuple[Call, Choice] | None
    fork: dict[str, Any] | None
    """Why it begins another trajectory: `after` (a call), `token` (the first that differs) and
    `why`; None if it begins none, or is the first."""


class CallTree:
    """Keeps what was sampled as token ids, and lets later calls continue it.

    A prompt whose text begins with an earlier prompt and its answer continues these tokens: only
    the rest of the text is tokenized. If it goes on without what ended the answer (a stop, an end
    of turn), these tokens leave the record. Any other prompt is tokenized as a whole, and begins a
    trajectory of its own.
    """

    def __init__(self, texts: Texts) -> None:
        self._texts = texts
        self.calls: list[Call] = []
        self.forks: list[dict[str, Any]] = []
        """For each call that begins another trajectory: `call`, and the fields of `Place.fork`."""

    def place(self, text: str) -> Place:
        """Find the longest conversation that a prompt's text continues."""
        best, end = None, -1
        for call, choice in self._in_order():
            if text.startswith(call.prompt_text):
                begin = len(call.prompt_text)
                length = self._length_of(choice, text[begin:])
                if length is not None and begin + length > end:
                    best, end = (call, choice), begin + length
        if best is not None:
            call, choice = best
            if text[len(call.prompt_text) : end] == choice.content != choice.text:
                choice.drop_end()
            known = [*call.prompt_ids, *choice.token_ids.tolist()]
            added = encode_after(self._texts, known, text[end:])
            if added is not None:
                return self._continuing([*known, *added], best, len(known), self._fork(text, end))
        return Place(self._texts.encode(text), None, self._fork(text))

    def _length_of(self, choice: Choice, text: str) -> int | None:
        """Return how many characters at the start of a text are an answer, or its content."""
        length = self._texts.turn_length(text, choice.text)
        if length is None and choice.content_tokens and not choice.continued:
            return len(choice.content) if text.startswith(choice.content) else None
        return length

    def _continuing(
        self,
        prompt_ids: list[int],
        parent: tuple[Call, Choice],
        known: int,
        fork: dict[str, Any] | None,
    ) -> Place:
        """Return the place of a call that continues an answer; a second such call is a fork."""
        call, choice = parent
        if fork is None and choice.continued:
            fork = {"after": call.number, "token": known, "why": "its answer is continued twice"}
        choice.continued = True
        return Place(prompt_ids, parent, fork)

    def place_ids(self, prompt_ids: list[int]) -> Place:
        """Find the longest conversation that a prompt of token ids continues."""
        best, end = None, -1
        for call, choice in self._in_order():
            known = [*call.prompt_ids, *choice.token_ids.tolist()]
            if len(known) > end and prompt_ids[: len(known)] == known:
                best, end = (call, choice), len(known)
        text = self._texts.decode(prompt_ids)
        if best is None:
            return Place(prompt_ids, None, self._fork(text))
        shared = len(self._texts.decode(prompt_ids[:end]))
        return self._continuing(prompt_ids, best, end, self._fork(text, shared))

    def add(self, key: tuple[str, int], text: str, place: Place) -> Call:
        """Add a call that is about to be sampled."""
        call_key = (len(place.prompt_ids), *key)
        call = Call(len(self.calls) + 1, call_key, place.prompt_ids, text, place.parent)
        self.calls.append(call)
        if place.fork is not None:
            self.forks.append({"call": call.number, **place.fork})
        return call

    def parts(self) -> list[SessionPart]:
        """Return the session's trajectories, which have each delivered token exactly once."""
        parents = {id(call.parent[1]) for call, _ in self._answers() if call.parent is not None}
        leaves = [pair for pair in self._answers() if id(pair[1]) not in parents]
        paths = [_path(*leaf) for leaf in leaves]
        paths.sort(key=lambda path: [_order(*step) for step in path])
        used: set[int] = set()
        parts: list[SessionPart] = []
        earned = credits_of([*self._answers()])
        for path in paths:
            new = [step for step in path if id(step[1]) not in used]
            used |= {id(choice) for _, choice in new}
            parts.append(joined(new, earned))
        return parts

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that the engine sampled for all calls."""
        return sum(choice.num_sampled for call in self.calls for choice in call.choices)

    @property
    def unanswered_tokens(self) -> int:
        """Number of sampled tokens that no trajectory has, counted answer by answer."""
        return sum(
            choice.num_sampled - len(choice.token_ids) if choice.delivered else choice.num_sampled
            for call in self.calls
            for choice in call.choices
        )

    @property
    def retokenized(self) -> int:
        """Number of delivered tokens that a tokenization of their text would change."""
        return sum(retokenized(self._texts, choice) for _, choice in self._answers())

    def _answers(self) -> Iterator[tuple[Call, Choice]]:
        for call in self.calls:
            yield from ((call, choice) for choice in call.choices if choice.delivered)

    def _in_order(self) -> list[tuple[Call, Choice]]:
        """Return the answers such that of equal ones always the same comes first."""
        return sorted(self._answers(), key=lambda pair: _order(*pair))

    def _fork(self, text: str, end: int = -1) -> dict[str, Any] | None:
        """Compare a prompt with the call that it shares most with."""
        most: tuple[int, Call, Choice] | None = None
        for call, choice in self._in_order():
            common = _common_length(call.prompt_text + choice.text, text)
            if most is None or common > most[0]:
                most = common, call, choice
        if most is None:
            return None
        common, call, choice = most
        if end >= 0 and (common <= end or common < len(call.prompt_text)):
            return None
        token_ids = [*call.prompt_ids, *choice.token_ids.tolist()]
        fits = partial_length(self._texts.decode, token_ids, common)
        what = "the text before its answer" if common < len(call.prompt_text) else "its answer"
        return {"after": call.number, "token": fits, "why": f"{what} was rewritten"}


def _order(call: Call, choice: Choice) -> tuple[Any, ...]:
    """Return the place of an answer in an order that is not that of arrival, which may differ."""
    return call.key, call.choices.index(choice)


def partial_length(
    decode: Callable[[Sequence[int]], str], token_ids: Sequence[int], characters: int
) -> int:
    """Return how many tokens have at most a number of characters together."""
    low, high = 0, len(token_ids)
    while low < high:
        middle = (low + high + 1) // 2
        if len(decode(token_ids[:middle])) <= characters:
            low = middle
        else:
            high = middle - 1
    return low


def _common_length(one: str, other: str) -> int:
    """Return how many characters two texts share at their start."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low


_BEFORE = 8
"""Tokens before a text with which it is decoded: some tokenizers drop a leading space."""


def decode_after(texts: Texts, before: Sequence[int], token_ids: Sequence[int]) -> str:
    """Return the text of tokens that follow others."""
    tail = list(before[-_BEFORE:])
    return texts.decode([*tail, *token_ids])[len(texts.decode(tail)) :]


def encode_after(texts: Texts, before: Sequence[int], text: str) -> list[int] | None:
    """Tokenize a text that follows tokens; None if these tokens would read as another text."""
    found = texts.encode(text)
    return found if decode_after(texts, before, found) == text else None


def _path(call: Call, choice: Choice) -> list[tuple[Call, Choice]]:
    """Return the conversation that ends with an answer, from its first call on."""
    path = [(call, choice)]
    while path[-1][0].parent is not None:
        path.append(path[-1][0].parent)
    return path[::-1]
