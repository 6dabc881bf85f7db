"""A call of an agent, and the answers that the policy sampled for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Texts(Protocol):
    """What a session needs of the tokenizer and of the model's format of turns."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without tokens for beginning or end of sequence."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, control tokens included."""
        ...

    def turn_length(self, text: str, turn: str) -> int | None:
        """Return how many characters at the start of a text are a turn; None if it is another."""
        ...


@dataclass(eq=False)
class Choice:
    """One answer that the policy sampled."""

    token_ids: NDArray[np.int64]
    """[R] sampled tokens, up to the end that the request asked for."""
    logprobs: NDArray[np.float32]
    """[R] log-probability of each token, in nats."""
    versions: NDArray[np.int32]
    """[R] policy version that sampled each token."""
    finish_reason: str
    """stop or length."""
    text: str
    """Text of all tokens, control tokens included."""
    num_sampled: int
    """Tokens that the engine sampled for it, also those after the end."""
    content: str
    """Text that the client gets: without what ended it."""
    content_tokens: int
    """Number of first tokens that are exactly this text; 0 if no number of them is."""
    delivered: bool = False
    """Whether the client was there to get it; only then it is trained and may be continued."""
    continued: bool = False
    """Whether a later call continues it."""

    def drop_end(self) -> None:
        """Forget the tokens after the content: a prompt goes on without them."""
        size = self.content_tokens
        self.token_ids, self.logprobs = self.token_ids[:size], self.logprobs[:size]
        self.versions, self.text = self.versions[:size], self.content


@dataclass(eq=False)
class Call:
    """One request of the agent."""

    number: int
    """Place in the order of arrival, from 1."""
    key: tuple[int, str, int]
    """Length and digest of the prompt, and how many equal ones came before: the same in a replay,
    also if requests run in parallel and arrive in another order."""
    prompt_ids: list[int]
    prompt_text: str
    """What the request says, as text."""
    parent: tuple[Call, Choice] | None
    """Call and answer that the prompt continues, token for token."""
    choices: list[Choice] = field(default_factory=list)
    identity: str = ""
    """Id of the answer, as the client gets it."""
    reward: float | None = None
    """Reward that the agent gave this call."""
    cached_tokens: int = 0
    """Tokens of the prompt whose keys and values were in the engine's prefix cache."""

    @property
    def delivered(self) -> bool:
        """Whether the client was there to get the answer."""
        return any(choice.delivered for choice in self.choices)

    @property
    def context(self) -> int:
        """Number of tokens before the first sampled one of the conversation."""
        return len(self.prompt_ids) if self.parent is None else self.parent[0].context
