"""A reward that fails for some samples, as one behind a network does."""

from typing import Any

from grpo_components.rewards.maths import MathCorrectness


class Flaky:
    """Correctness of the answer; raises if 4 divides the number of characters of the response."""

    def __init__(self) -> None:
        self._correct = MathCorrectness(answer_format="gsm8k")

    def __call__(self, *, response_text: str, **row: Any) -> float:
        """Return the reward of one response."""
        if len(response_text) % 4 == 0:
            raise ConnectionError("the scoring service is down")
        return self._correct(response_text=response_text, **row)
