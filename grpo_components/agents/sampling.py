"""Samples the choices of one call, and cuts each where the answer ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from grpo_components.agents.calls import Call, Choice, decode_after, partial_length
from grpo_components.agents.chat import Chat
from grpo_components.agents.requests import SamplingRequest
from grpo_components.agents.streams import AnswerWatch, first_of

Send = Callable[[int, str], object]
"""Function of the number of a choice and of the next piece of its text."""


class AnswerSampler:
    """Samples what a session asks for."""

    def __init__(
        self,
        name: str,
        chat: Chat,
        submit: Callable[..., Future[Any]],
        seed_of: Callable[..., int],
    ) -> None:
        self._name, self._chat, self._submit, self._seed_of = name, chat, submit, seed_of

    async def sample(
        self, call: Call, request: SamplingRequest, room: int, send: Send | None, tools: bool
    ) -> None:
        """Sample the choices of a call."""
        ids = [self._chat.encode(text) for text in request.stop]
        single = [found[0] for found in ids if len(found) == 1]
        marks = self._chat.marks if tools else ()
        watched = send is not None or len(single) < len(ids)
        futures = [
            self._submit(
                call.prompt_ids,
                max_tokens=room,
                seed=self._seed(call, request, index),
                stop_token_ids=[*self._chat.stop_token_ids, *single],
                name=self._name_of(call, index),
                watch=AnswerWatch(
                    *(self._chat, call.prompt_ids, request.stop),
                    None if send is None else _numbered(send, index),
                    marks,
                )
                if watched
                else None,
            )
            for index in range(request.num_choices)
        ]
        found = await asyncio.gather(*map(asyncio.wrap_future, futures))
        call.cached_tokens = found[0].cached_tokens
        call.choices = [self._cut(call, completion, request.stop) for completion in found]

    def _seed(self, call: Call, request: SamplingRequest, index: int) -> int:
        _, digest, occurrence = call.key
        # An equal request gets another answer, unless it names its seed.
        own = (occurrence, 0) if request.seed is None else (0, request.seed + 1)
        return self._seed_of(int(digest[:15], 16), *own, index)

    def _name_of(self, call: Call, index: int) -> str:
        depth, above = 1, call.parent
        while above is not None:
            depth, above = depth + 1, above[0].parent
        name = f"{self._name} call {depth}:{call.key[1][:12]}"
        return name if index == 0 else f"{name} choice {index}"

    def _cut(self, call: Call, completion: Any, stop: Sequence[str]) -> Choice:
        """Make a choice of what the engine sampled, up to the token that completes a stop."""
        ids = completion.token_ids

        def decode(first: Sequence[int]) -> str:
            return decode_after(self._chat, call.prompt_ids, first)

        text, size, reason = decode(ids.tolist()), len(ids), completion.finish_reason
        content = text.removesuffix(self._chat.stop_text(text))
        if found := first_of(stop, text):
            content, end = text[: found[0]], found[0] + len(found[1])
            size = min(partial_length(decode, ids.tolist(), end - 1) + 1, len(ids))
            text, reason = decode(ids[:size].tolist()), "stop"
        fits = partial_length(decode, ids.tolist(), len(content))
        return Choice(
            *(ids[:size], completion.logprobs[:size], completion.token_versions[:size]),
            *(reason, text, len(ids), content),
            content_tokens=fits if decode(ids[:fits].tolist()) == content else 0,
        )


def _numbered(send: Send, index: int) -> Callable[[str], object]:
    return lambda piece: send(index, piece)
