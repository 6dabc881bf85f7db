"""A quiz: several questions in one conversation, of which each is asked when the last was right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from grpo_components.rollout.datasets import PromptDataset, gsm8k_dataset
from grpo_components.rollout.environments import Prompt
from grpo_components.rollout.multi_turn import Reply


def quiz_dataset(tokenizer: Any, *, num_questions: int = 2, **kwargs: Any) -> PromptDataset:
    """Prompts of `gsm8k_dataset`, each with the questions of the rows behind it to follow.

    Args:
        tokenizer: torchtune's.
        num_questions: in a conversation.
        kwargs: arguments of `gsm8k_dataset`.

    Raises:
        ValueError: if there is no second question to ask, or what `gsm8k_dataset` raises.
    """
    rows = gsm8k_dataset(tokenizer, **kwargs)
    if not 2 <= num_questions <= len(rows):
        problem = f"{num_questions} given; allowed: from 2 to the {len(rows)} rows of its source"
        raise ValueError(f"dataset.num_questions: {problem}")

    def following(index: int) -> list[dict[str, str]]:
        others = (rows[(index + step) % len(rows)] for step in range(1, num_questions))
        return [{"question": row["prompt_text"], "answer": row["answer"]} for row in others]

    return PromptDataset([{**rows[i], "following": following(i)} for i in range(len(rows))])


class Quiz:
    """The world that asks the next question of a `quiz_dataset` row after each right answer.

    A wrong answer ends the quiz, so that only who answers all of them is right in the end.

    Args:
        reward: for each right answer before the last, which the config's rewards judge.
    """

    def __init__(self, reward: float = 0.5) -> None:
        self._reward = reward

    def __call__(self, prompt: Prompt, seed: int) -> Callable[[str], Reply]:
        """Begin a quiz.

        Args:
            prompt: a row of `quiz_dataset`.
            seed: not used.
        """
        following = list(prompt["following"])
        answers = [prompt["answer"], *(row["answer"] for row in following)]

        def respond(text: str) -> Reply:
            answer = answers.pop(0)
            if not answers:
                return Reply(done=True, answer=answer)
            # To the letter: what takes longer to compare belongs in a reward's process.
            if text.rpartition("####")[2].strip() != answer:
                return Reply(done=True, answer=answer)
            question = following.pop(0)["question"]
            return Reply(f"\n{question}", rewards={"earlier_answers": self._reward})

        return respond
