"""Follows an answer while it is sampled: ends it at its stops, and passes its text on in pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from grpo_components.agents.calls import Texts, decode_after

_TAIL = 8
"""Tokens before a piece with which it is decoded."""
_MOST_BYTES = 4
"""Tokens that one character may take, at most."""


class AnswerWatch:
    """Called by the engine with the tokens of one choice so far; says where it ends.

    What it answers depends on the tokens only, so a replay ends at the same one.
    """

    def __init__(
        self,
        texts: Texts,
        prompt_ids: Sequence[int],
        stops: Sequence[str],
        send: Callable[[str], object] | None = None,
        marks: Sequence[str] | None = (),
    ) -> None:
        self._texts, self._stops, self._send, self._marks = texts, stops, send, marks
        self._before, self._pending = list(prompt_ids[-_TAIL:]), list[int]()
        self._size = self._shown = 0
        self._text, self._marked = "", False

    def __call__(self, token_ids: Sequence[int]) -> bool:
        """Follow the tokens so far; return whether a stop is complete."""
        self._pending += token_ids[self._size :]
        self._size = len(token_ids)
        piece = decode_after(self._texts, self._before, self._pending)
        if piece.endswith("\N{REPLACEMENT CHARACTER}") and len(self._pending) < _MOST_BYTES:
            return False  # a part of a character
        begin = len(self._text)
        self._text += piece
        self._before, self._pending = [*self._before, *self._pending][-_TAIL:], []
        stop = first_of(self._stops, self._text, begin)
        self._show(begin, stop[0] if stop else None)
        return stop is not None

    def _show(self, begin: int, stop: int | None) -> None:
        """Pass on what is certainly text of the answer."""
        if self._send is None or self._marks is None or self._marked:
            return
        end = len(self._text) if stop is None else stop
        if mark := first_of(self._marks, self._text, begin):
            self._marked, end = True, min(end, mark[0])
        elif stop is None:
            end -= _open_length([*self._stops, *self._marks], self._text)
        if self._marks:  # parsers drop the space before a tool call
            end = len(self._text[:end].rstrip())
        if end > self._shown:
            self._send(self._text[self._shown : end])
            self._shown = end


def first_of(texts: Sequence[str], text: str, begin: int = 0) -> tuple[int, str] | None:
    """Return place and text of the one that comes first in a text; None if none does."""
    longest = max(map(len, texts), default=0)
    since = max(0, begin - longest + 1)
    return min(((text.find(one, since), one) for one in texts if one in text[since:]), default=None)


def _open_length(texts: Sequence[str], text: str) -> int:
    """Return how many characters at the end of a text may begin one of some texts."""
    sizes = (n for one in texts for n in range(1, len(one)) if text.endswith(one[:n]))
    return max(sizes, default=0)
