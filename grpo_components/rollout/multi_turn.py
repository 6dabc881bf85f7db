"""The multi-turn environment: the policy takes turns with a world, a function that replies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace

from grpo_components.objective.component_errors import defined_at
from grpo_components.rewards.pool import Score
from grpo_components.rollout.samples import Prompt

_MAX_TOKEN_CHARS = 1000
"""Upper bound on the characters of one token, in any vocabulary."""


@dataclass(frozen=True)
class Reply:
    """The world's reply to one turn of the policy."""

    text: str = ""
    """Text for the policy to read before its next turn; ignored if `done`."""
    done: bool = False
    """Whether the conversation is over."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Rewards of this turn by name; added to the sample's reward without a weight."""
    answer: str | None = None
    """Reference answer for the config's rewards of the last turn; None: use the prompt's answer."""


World = Callable[[Prompt, int], Callable[[str], Reply]]
"""Function that begins a conversation, `world(prompt, seed)`. It returns a function that takes the
text of a turn and returns a `Reply`. All randomness must come from the seed, so that a repeated
group is identical."""


class MultiTurnEnvironment:
    """Lets the policy and a world take turns, without ever tokenizing a text twice.

    The policy's token ids stay as sampled. The world's text is tokenized separately and appended.
    A response ends when the world ends it, or at a limit: after `max_turns`, or if the world's text
    and one more token would not fit. At a limit, `finish_reason` is `length`.

    The reward of a sample is the sum of two parts: the config's rewards for the policy's last turn,
    and the world's rewards for all turns. `reward_terms` holds each of these rewards by name.

    Args:
        max_turns: largest number of turns of the policy.
        world: function that begins each conversation, see `World`.
    """

    environment_kind = "multi_turn"

    def __init__(self, max_turns: int, world: World) -> None:
        self.max_turns, self.world = max_turns, world


class Conversation:
    """A policy's conversation with a world: counts the turns, adds up the world's rewards."""

    def __init__(
        self,
        environment: MultiTurnEnvironment,
        prompt: Prompt,
        encode: Callable[[str], Sequence[int]],
    ) -> None:
        self._encode, self._turns_left = encode, environment.max_turns
        # A copy, so that a world that changes its prompt affects no other conversation.
        self._respond = environment.world(deepcopy(prompt), prompt["seed"])
        if not callable(self._respond):
            problem = f"the world returned {self._respond!r:.100}{defined_at(environment.world)}"
            raise TypeError(f"{problem}; allowed: a function")
        self._rewards: Counter[str] = Counter()
        """The world's rewards of all turns, by name."""
        self.answer: str | None = None
        self.finish_reason = "stop"

    def take_turn(self, text: str, finish_reason: str, room: int) -> list[int] | None:
        """Return the token ids of the world's reply to a turn; None if the conversation is over.

        `finish_reason` says how the turn ended; `room` is the maximum number of reply tokens.
        """
        reply = self._respond(text)
        if not isinstance(reply, Reply):
            where = defined_at(self._respond)
            raise TypeError(f"the world replied {reply!r:.100}{where}; allowed: a Reply")
        self._turns_left -= 1
        for name, value in reply.rewards.items():
            self._rewards[name] += float(value)  # pyright: ignore -- of any number
        self.answer, self.finish_reason = reply.answer, finish_reason
        if reply.done or finish_reason != "stop":
            return None
        # A very long text is slow to tokenize.
        if self._turns_left and room >= 0 and len(reply.text) <= room * _MAX_TOKEN_CHARS:
            reply_ids = list(self._encode(reply.text))
            if len(reply_ids) <= room:
                return reply_ids
        self.finish_reason = "length"
        return None

    def add_rewards(self, score: Score) -> Score:
        """Add the world's rewards of all turns to the score of the last turn."""
        terms = dict(self._rewards)
        if duplicates := sorted(terms.keys() & score.terms.keys()):
            allowed = "a name that is not in the config's rewards"
            raise ValueError(f"Reply.rewards: {duplicates[0]!r} given; allowed: {allowed}")
        total = score.reward + sum(terms.values())
        return replace(score, reward=total, terms={**terms, **score.terms})
