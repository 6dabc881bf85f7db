"""A reward that fails for some samples, as one behind a network does."""

from grpo_components.rewards.maths import MathCorrectness


class Flaky:
    """Correctness of the answer; raises for prompts whose text has an even length."""

    def __init__(self) -> None:
        self._correct = MathCorrectness(answer_format="gsm8k")

    def __call__(
        self, *, prompt_text: str, response_text: str, answer: str, finish_reason: str
    ) -> float:
        """Return the reward of one response."""
        if len(response_text) % 4 == 0:
            raise ConnectionError("the scoring service is down")
        return self._correct(
            prompt_text=prompt_text,
            response_text=response_text,
            answer=answer,
            finish_reason=finish_reason,
        )
