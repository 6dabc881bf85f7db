"""Rewards for the form of a response: its `<think>` tags, boxed answer or length."""

from __future__ import annotations

import re
from typing import Any

from grpo_components.data.boxes import last_boxed
from grpo_components.rewards.maths import RESPONSE_CPU_S


class ThinkAnswerFormat:
    """1 if the text is just `<think>...</think> <answer>...</answer>`, both not empty; else 0.

    If the prompt ends with `<think>`, the response starts inside the tag and must not open it
    again. Otherwise the response must write the opening tag.
    """

    response_cpu_s = RESPONSE_CPU_S
    _tags = ("<think>", "</think>", "<answer>", "</answer>")
    _whole = re.compile(r"\s*<think>(.*?)</think>\s*<answer>(.*?)</answer>\s*", re.DOTALL)

    def __call__(self, *, prompt_text: str, response_text: str, **_: Any) -> float:
        """Score one response."""
        opened = prompt_text.rstrip().endswith("<think>")
        text = ("<think>" if opened else "") + response_text
        # Count first: matching a text of thousands of tags would take seconds.
        once = all(text.count(tag) == 1 for tag in self._tags)
        match = self._whole.fullmatch(text) if once else None
        return float(match is not None and all(part.strip() for part in match.groups()))


class BoxedFormat:
    """1 if the response has exactly one complete and non-empty `\\boxed{...}`, else 0."""

    response_cpu_s = RESPONSE_CPU_S

    def __call__(self, *, response_text: str, **_: Any) -> float:
        """Score one response."""
        return float(
            len(re.findall(r"\\boxed(?!\s*[^\s{])", response_text)) == 1
            and response_text.count("\\boxed") == 1
            and bool(last_boxed(response_text).strip())
        )


class ResponseLength:
    """1 for a response of `min_words` to `max_words` words; falls linearly to 0 outside.

    The reward reaches 0 at no words (if `min_words` is above 0) and at twice `max_words`. For a
    penalty in tokens, close to the longest allowed response, see `reward_shaping.overlong_tokens`.

    Args:
        max_words: largest number of words with full reward. Words are separated by blanks.
        min_words: smallest number of words with full reward.
    """

    response_cpu_s = RESPONSE_CPU_S

    def __init__(self, max_words: int, min_words: int = 0) -> None:
        self._min_words, self._max_words = min_words, max_words

    def __call__(self, *, response_text: str, **_: Any) -> float:
        """Score one response."""
        words = len(response_text.split())
        if words < self._min_words:
            return words / self._min_words
        return max(0.0, min(1.0, 2.0 - words / self._max_words))
