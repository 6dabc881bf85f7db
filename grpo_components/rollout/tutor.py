"""An example world, a tutor: rejects wrong lines, and asks for the answer after a right one."""

from __future__ import annotations

from collections.abc import Callable

from grpo_components.rollout.multi_turn import Reply
from grpo_components.rollout.samples import Prompt


class Tutor:
    """World that replies to a wrong line such as `3+4=6` with a hint, and to `3+4=7` with `####`.

    After a hint the policy writes another line. After `####` it writes only the number, to be
    judged by the config's rewards. A turn is one line if `generator.stop_token_ids` contains the
    newline.

    Args:
        penalty: amount that each wrong line subtracts from the reward.
        hint: reply to a wrong line.
    """

    def __init__(self, penalty: float = 0.25, hint: str = "Wrong.\nAnswer:\n") -> None:
        self._penalty, self._hint = penalty, hint

    def __call__(self, prompt: Prompt, seed: int) -> Callable[[str], Reply]:
        """Begin a conversation; return the function that replies to each turn of the policy."""
        asked = False

        def respond(text: str) -> Reply:
            nonlocal asked
            if asked:
                return Reply(done=True)
            # Compare as text: a slower comparison belongs in a reward process.
            asked = text.rpartition("=")[2].strip() == prompt["answer"]
            if asked:
                return Reply("#### ")
            return Reply(self._hint, rewards={"wrong_lines": -self._penalty})

        return respond
