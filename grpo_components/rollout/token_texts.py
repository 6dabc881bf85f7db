"""The text of each token of a response, for the log of rollouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_MOST_BYTES = 4
"""Of a character in UTF-8, so that no more tokens can share one."""


def token_texts(token_ids: Sequence[int], decode: Callable[[list[int]], str]) -> list[str]:
    """Split a response's text into those of its tokens.

    A character whose bytes are spread over several tokens stands at the last of them. Tokens are
    decoded after their predecessor, because alone some lose the space that they begin with.

    Args:
        token_ids: [R] of the response.
        decode: token ids -> text.

    Returns:
        [R] texts, which joined are the text of all.
    """
    texts: list[str] = []
    before: list[int] = []
    pending: list[int] = []
    for number, token_id in enumerate(token_ids, start=1):
        pending.append(token_id)
        found = decode(before + pending)[len(decode(before)) :]
        is_torn = found.endswith("\N{REPLACEMENT CHARACTER}")
        if is_torn and len(pending) < _MOST_BYTES and number < len(token_ids):
            texts.append("")
            continue
        texts.append(found)
        before, pending = pending, []
    return texts
