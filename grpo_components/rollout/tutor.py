"""A tutor for the tiny policy: it checks the working, and asks for the answer once it is right."""

from __future__ import annotations

from collections.abc import Callable

from grpo_components.rollout.environments import Prompt
from grpo_components.rollout.multi_turn import Reply


class Tutor:
    """The world that answers a line such as `3+4=6` with a hint, and `3+4=7` with `####`.

    The policy answers the first with another line, the second with the number alone, which the
    config's rewards judge. A turn is a line where `generator.stop_token_ids` has the newline.

    Args:
        penalty: what each wrong line costs.
        hint: said after it.
    """

    def __init__(self, penalty: float = 0.25, hint: str = "Wrong.\nAnswer:\n") -> None:
        self._penalty, self._hint = penalty, hint

    def __call__(self, prompt: Prompt, seed: int) -> Callable[[str], Reply]:
        """Begin a conversation.

        Args:
            prompt: with the `answer` that the working must come to.
            seed: not used.
        """
        asked = False

        def respond(text: str) -> Reply:
            nonlocal asked
            if asked:
                return Reply(done=True)
            # To the letter: what takes longer to compare belongs in a reward's process.
            asked = text.rpartition("=")[2].strip() == prompt["answer"]
            if asked:
                return Reply("#### ")
            return Reply(self._hint, rewards={"wrong_lines": -self._penalty})

        return respond
