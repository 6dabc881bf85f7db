"""Tokenizes an environment's text; untrusted parts of it never become control tokens."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from functools import cache
from itertools import pairwise
from typing import Any

_OPENS, _CLOSES = "\ufdd0", "\ufdd1"  # noncharacters of Unicode: no text has them
_QUOTE = re.compile(f"{_OPENS}([^{_CLOSES}]*){_CLOSES}")
_MARKER = re.compile(r"(?=(<[^<>\s]+>|\[/?[A-Z_]+\]))")
"""Finds what looks like a chat marker, such as `[INST]` or `<tools>`, even if it is not a token."""


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Tokenize a text that continues a conversation; the name of a control token becomes the token.

    In `quoted` text, names stay text. torchtune's own tokenizers differ: Llama 3's encodes
    `<|eot_id|>` as plain text, Qwen's as a control token, and those based on SentencePiece put a
    space before each text.
    """
    special: dict[str, int] | None = getattr(tokenizer, "special_tokens", None)
    names = {*(special or ()), *markers(str(getattr(tokenizer, "chat_template", "")))}
    if special is None:  # SentencePiece lists none: a control token's name is one token
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
    """Mark a text that comes from outside, so that `encode_text` makes no control token of it.

    Halves of surrogate pairs, which tokenizers refuse, become question marks.

    Args:
        text: text to mark, for example the result of a tool, which the policy may influence.
    """
    text = text.encode("utf-8", "replace").decode("utf-8")
    return _OPENS + re.sub(f"[{_OPENS}{_CLOSES}]", "", text) + _CLOSES


def unquoted(text: str, names: Iterable[str]) -> str:
    """Remove the marks of `quoted` from a text; break control tokens' names in the marked parts.

    A name is broken by a space if at least a part of it was marked. Names are the given `names`,
    and the chat markers that stand in the unmarked parts of the text.
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
    """Return a regular expression for the longest name that matches, fast for many names."""
    first = "".join(sorted({re.escape(name[0]) for name in names}))
    ordered = map(re.escape, sorted(names, key=len, reverse=True))
    return f"(?=[{first}])(?:{'|'.join(ordered)})" if names else "(?!)"


@cache
def _starts_of(names: frozenset[str]) -> re.Pattern[str]:
    """Return a pattern whose group 1 finds all names of 2 or more characters, even overlapping."""
    return re.compile(f"(?=({_any_of(frozenset(name for name in names if len(name) > 1))}))")
