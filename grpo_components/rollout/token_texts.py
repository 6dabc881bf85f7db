"""Splits the text of a response into its tokens, for the log of rollouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_MAX_UTF8_BYTES = 4
"""Most bytes of one character, and therefore most tokens that can share a character."""


def token_texts(token_ids: Sequence[int], decode: Callable[[list[int]], str]) -> list[str]:
    """Decode each token of a response.

    If several tokens share a character, the last of them gets it. Each token is decoded together
    with its predecessor, because some tokens lose their leading space when decoded alone.

    Args:
        token_ids: [R] token ids of the response.
        decode: function that converts token ids to text.

    Returns:
        [R] texts; joined, they are the text of the response.
    """
    texts: list[str] = []
    before: list[int] = []
    pending: list[int] = []
    for number, token_id in enumerate(token_ids, start=1):
        pending.append(token_id)
        found = decode(before + pending)[len(decode(before)) :]
        is_torn = found.endswith("\N{REPLACEMENT CHARACTER}")
        if is_torn and len(pending) < _MAX_UTF8_BYTES and number < len(token_ids):
            texts.append("")
            continue
        texts.append(found)
        before, pending = pending, []
    return texts
