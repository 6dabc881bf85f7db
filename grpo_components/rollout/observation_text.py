"""Encodes environment text: its frame may contain control tokens, text that it quotes may not."""

from __future__ import annotations

import inspect
import re
from typing import Any

# Finds the first character of a control token, of any model family: also those that the policy does
# not use.
_CONTROL = re.compile(
    r"<(?=[|\uff5c]|/?(?:tool_\w+|tools|think|thinking|reasoning|s|unk|mask)>"
    r"|(?:bos|eos|pad|(?:start|end)_of_\w+|begin_of_\w+|fim_\w+|image\w*|unused\d+|reserved\w*"
    r"|(?:im|file|repo)_\w+|0x[0-9A-Fa-f]{2})>|<SYS>>|</SYS>>)"
    r"|\[(?=/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_\w+|IMG\w*|THINK)\])"
)


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Encode a text that continues a conversation; names of control tokens become these tokens.

    torchtune's tokenizers would differ: the one of Llama 3 encodes `<|eot_id|>` as plain text, the
    one of Qwen as a control token, and those based on SentencePiece put a space before each text.
    """
    special: dict[str, int] = getattr(tokenizer, "special_tokens", {})
    pattern = "|".join(re.escape(name) for name in sorted(special, key=len, reverse=True))
    token_ids: list[int] = []
    for part in re.split(f"({pattern})", text) if special else [text]:
        if part in special:
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


def quoted(text: str) -> str:
    """Return a text from outside, changed so that it contains no control tokens and no tool tags.

    Halves of surrogate pairs, which tokenizers refuse, become question marks.

    Args:
        text: text to change, for example the result of a tool, which the policy may influence.
    """
    return _CONTROL.sub(r"\g<0> ", text.encode("utf-8", "replace").decode("utf-8"))
