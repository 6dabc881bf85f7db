"""What an environment says as token ids: control tokens in its frame, none in what it quotes."""

from __future__ import annotations

import inspect
import re
from typing import Any

# Those of the families' vocabularies, whether or not the policy's own has them.
_CONTROL = re.compile(
    r"<(?=[|\uff5c]|/?(?:tool_\w+|tools|think|thinking|reasoning|s|unk|mask)>"
    r"|(?:bos|eos|pad|(?:start|end)_of_\w+|begin_of_\w+|fim_\w+|image\w*|unused\d+|reserved\w*"
    r"|(?:im|file|repo)_\w+|0x[0-9A-Fa-f]{2})>|<SYS>>|</SYS>>)"
    r"|\[(?=/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_\w+|IMG\w*|THINK)\])"
)


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text, alone, whose control tokens are found by their names.

    torchtune's Llama 3 tokenizer would spell a `<|eot_id|>` out; its Qwen one would not. Those of
    SentencePiece would begin each text with a space that nobody said.

    Args:
        tokenizer: torchtune's.
        text: such as a message with its frame.
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
    if "trim_leading_whitespace" not in inspect.signature(tokenizer.encode).parameters:
        return alone
    # SentencePiece's. Not by that option: it loses a newline that is one token with that before it.
    line = tokenizer.encode("\n", add_bos=False, add_eos=False)
    after_line = tokenizer.encode(f"\n{text}", add_bos=False, add_eos=False)
    return after_line[len(line) :] if after_line[: len(line)] == line else alone


def quoted(text: str) -> str:
    """A text from outside, in which nothing reads as a control token or a tool's tag.

    Halves of surrogate pairs, which no tokenizer takes, become question marks.

    Args:
        text: such as a tool's result, which the policy may have written itself.
    """
    return _CONTROL.sub(r"\g<0> ", text.encode("utf-8", "replace").decode("utf-8"))
