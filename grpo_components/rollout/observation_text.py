"""Encodes an environment's text, of which only unquoted parts may contain control tokens."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from functools import cache
from itertools import pairwise
from typing import Any

_OPENS, _CLOSES = "\ufdd0", "\ufdd1"  # no characters, by Unicode: no text has them
_QUOTE = re.compile(f"{_OPENS}([^{_CLOSES}]*){_CLOSES}")
_MARKER = re.compile(r"(?=(<[^<>\s]+>|\[/?[A-Z_]+\]))")
"""Finds what looks like a chat marker, such as `[INST]` or `<tools>`, even if it is no token."""


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Encode a text that continues a conversation; names of control tokens become the tokens.

    In `quoted` text, they stay text. torchtune's own tokenizers differ: Llama 3's encodes
    `<|eot_id|>` as plain text, Qwen's as a control token, and those based on SentencePiece put a
    space before each text.
    """
    special: dict[str, int] | None = getattr(tokenizer, "special_tokens", None)
    names = {*(special or ()), *markers(str(getattr(tokenizer, "chat_template", "")))}
    if special is None:  # SentencePiece keeps its own: their names are a token each
        names |= {m for m in markers(text) if len(_encode_alone(tokenizer, m)) == 1}
    text = unquoted(text, names)
    token_ids: list[int] = []
    for part in re.split(f"({_any_of(frozenset(special or ()))})", text):
        if special and part in special:
            token_ids.append(special[part])
        elif part:
            token_ids += _encode_alone(tokenizer, part)
    return token_ids


def _encode_alone(tokenizer: Any, text: str) -> list[int]:
    alone = tokenizer.encode(text, add_bos=False, add_eos=False)
    of_torchtune = "trim_leading_whitespace" in inspect.signature(tokenizer.encode).parameters
    if not (of_torchtune or getattr(tokenizer, "adds_leading_space", False)):
        return alone
    # SentencePiece: encode the text after a newline, then remove the newline. The tokenizer's own
    # trim_leading_whitespace would lose newlines that merge into one token.
    line = tokenizer.encode("\n", add_bos=False, add_eos=False)
    after_line = tokenizer.encode(f"\n{text}", add_bos=False, add_eos=False)
    return after_line[len(line) :] if after_line[: len(line)] == line else alone


def markers(text: str) -> set[str]:
    """Return the substrings that look like chat markers."""
    return set(_MARKER.findall(text))


def quoted(text: str) -> str:
    """Mark a text from outside: `encode_text` lets nothing in it act as a control token.

    Halves of surrogate pairs, which tokenizers refuse, become question marks.

    Args:
        text: text to mark, for example the result of a tool, which the policy may influence.
    """
    text = text.encode("utf-8", "replace").decode("utf-8")
    return _OPENS + re.sub(f"[{_OPENS}{_CLOSES}]", "", text) + _CLOSES


def unquoted(text: str, names: Iterable[str]) -> str:
    """Remove the marks of `quoted` from a text, so that quoted parts spell no control token.

    A blank splits each of `names`, and each marker of the unquoted text, that is partly quoted.
    """
    parts = _QUOTE.split(text)
    whole = "".join(parts)
    is_quoted = "".join("01"[number % 2] * len(part) for number, part in enumerate(parts))
    found = {name.strip() for name in (*names, *markers("\n".join(parts[::2])))}
    cuts = {0}
    for name in _starts_of(frozenset(found)).finditer(whole) if len(parts) > 1 else ():
        start, end = name.span(1)
        if (first := is_quoted.find("1", start, end)) >= 0:
            cuts.add(max(start + 1, first))
    ends = [*sorted(cuts), len(whole)]
    return " ".join(whole[start:end] for start, end in pairwise(ends))


@cache
def _any_of(names: frozenset[str]) -> str:
    """Return a pattern that finds the longest of some names, of which there may be thousands."""
    first = "".join(sorted({re.escape(name[0]) for name in names}))
    ordered = map(re.escape, sorted(names, key=len, reverse=True))
    return f"(?=[{first}])(?:{'|'.join(ordered)})" if names else "(?!)"


@cache
def _starts_of(names: frozenset[str]) -> re.Pattern[str]:
    """Return a pattern whose group 1 is each name of 2 or more characters, even if two overlap."""
    return re.compile(f"(?=({_any_of(frozenset(name for name in names if len(name) > 1))}))")
