"""Rewards for the form of a response: its tags, its box, its length."""

from __future__ import annotations

import re

from grpo_components.rewards.maths import RESPONSE_CPU_S, last_boxed


class ThinkAnswerFormat:
    """1 if the text reads `<think>...</think> <answer>...</answer>` and nothing else, else 0.

    Something must stand in both.
    A prompt that ends with `<think>` has written the opening tag itself: then the response starts
    inside it, and writing a second one earns nothing. Otherwise the response must write it.
    """

    max_reward = 1.0
    response_cpu_s = RESPONSE_CPU_S
    _tags = ("<think>", "</think>", "<answer>", "</answer>")
    _whole = re.compile(r"\s*<think>(.*?)</think>\s*<answer>(.*?)</answer>\s*", re.DOTALL)

    def __call__(
        self, *, prompt_text: str, response_text: str, answer: str, finish_reason: str
    ) -> float:
        """Score one response.

        Args:
            prompt_text: its end decides who writes `<think>`.
            response_text: judged.
            answer: not used.
            finish_reason: not used.
        """
        opened = prompt_text.rstrip().endswith("<think>")
        text = ("<think>" if opened else "") + response_text
        # Counted first: without it, thousands of tags would keep the pattern busy for seconds.
        once = all(text.count(tag) == 1 for tag in self._tags)
        match = self._whole.fullmatch(text) if once else None
        return float(match is not None and all(part.strip() for part in match.groups()))


class BoxedFormat:
    """1 if the response has exactly one whole `\\boxed{...}`, and something in it, else 0."""

    max_reward = 1.0
    response_cpu_s = RESPONSE_CPU_S

    def __call__(
        self, *, prompt_text: str, response_text: str, answer: str, finish_reason: str
    ) -> float:
        """Score one response.

        Args:
            prompt_text: not used.
            response_text: judged.
            answer: not used.
            finish_reason: not used.
        """
        return float(
            response_text.count("\\boxed") == 1 and bool(last_boxed(response_text).strip())
        )


class ResponseLength:
    """1 for a response of `min_words` to `max_words` words, falling to 0 at none and twice as many.

    For a limit in tokens, near the longest response, see `reward_shaping.overlong_tokens`.

    Args:
        max_words: words, separated by blanks, that cost nothing.
        min_words: as few that cost nothing; below, the reward is linear in their number.

    Raises:
        ValueError: the two are out of range.
    """

    max_reward = 1.0
    response_cpu_s = RESPONSE_CPU_S

    def __init__(self, max_words: int, min_words: int = 0) -> None:
        whole = type(max_words) is int and type(min_words) is int
        if not whole or not 0 <= min_words <= max_words or max_words < 1:
            raise ValueError(
                f"max_words, min_words: {max_words!r}, {min_words!r} given; allowed: whole "
                "numbers, 0 <= min_words <= max_words, max_words >= 1"
            )
        self._min_words, self._max_words = min_words, max_words

    def __call__(
        self, *, prompt_text: str, response_text: str, answer: str, finish_reason: str
    ) -> float:
        """Score one response.

        Args:
            prompt_text: not used.
            response_text: its words are counted.
            answer: not used.
            finish_reason: not used.
        """
        words = len(response_text.split())
        if words < self._min_words:
            return words / self._min_words
        return max(0.0, min(1.0, 2.0 - words / self._max_words))
