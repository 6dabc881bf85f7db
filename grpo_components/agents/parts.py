"""The trajectories of a session: each answer in one of them, checked against what was sampled."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grpo_components.agents.choices import Call, Choice, Texts


@dataclass(frozen=True)
class SessionPart:
    """Tokens of one trajectory of a session; R is the number of its response tokens."""

    prompt_ids: NDArray[np.int64]
    response_ids: NDArray[np.int64]
    response_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    finish_reason: str
    drift: int = 0
    """Sampled tokens that do not follow the tokens that the policy saw when it sampled them."""
    call_rewards: list[dict[str, Any]] = field(default_factory=list)
    """For each answer `tokens` (first, and the one after the last), its own `reward` or None, and
    `sum` and `count` of the rewards from it on; empty if no call of the session has one."""


def joined(steps: Sequence[tuple[Call, Choice]], earned: dict[int, Credit]) -> SessionPart:
    """Join answers and what lies between them; what lies before the first one is the prompt."""
    prompt_ids = steps[0][0].prompt_ids
    ids: list[int] = []
    masks: list[NDArray[np.bool_]] = []
    logprobs: list[NDArray[np.float32]] = []
    versions: list[NDArray[np.int32]] = []
    rewards: list[dict[str, Any]] = []
    drift = 0
    for call, choice in steps:
        between = call.prompt_ids[len(prompt_ids) + len(ids) :]
        ids += between
        size, sampled = len(between), len(choice.token_ids)
        if [*prompt_ids, *ids] != call.prompt_ids:
            drift += sampled
        if credit := earned.get(id(choice)):
            rewards.append({"tokens": [len(ids), len(ids) + sampled], **credit.fields()})
        ids += choice.token_ids.tolist()
        masks += [np.zeros(size, bool), np.ones(sampled, bool)]
        logprobs += [np.zeros(size, np.float32), choice.logprobs]
        versions += [np.full(size, -1, np.int32), choice.versions]
    columns = [np.concatenate(column) for column in (masks, logprobs, versions)]
    return SessionPart(
        *(np.array(prompt_ids, np.int64), np.array(ids, np.int64), *columns),  # pyright: ignore
        *(steps[-1][1].finish_reason, drift, rewards),  # pyright: ignore
    )


@dataclass
class Credit:
    """Rewards of an answer and of what continues it."""

    reward: float | None
    total: float = 0.0
    count: int = 0

    def fields(self) -> dict[str, Any]:
        """Return the fields of `SessionPart.call_rewards`."""
        return {"reward": self.reward, "sum": self.total, "count": self.count}


def credits_of(answers: Sequence[tuple[Call, Choice]]) -> dict[int, Credit]:
    """Return for each answer its reward, and sum and number of rewards from it on."""
    if all(call.reward is None for call, _ in answers):
        return {}
    found = {id(choice): Credit(call.reward) for call, choice in answers}
    for call, choice in answers:
        if call.reward is None:
            continue
        place: tuple[Call, Choice] | None = (call, choice)
        while place is not None:
            credit = found[id(place[1])]
            credit.total, credit.count = credit.total + call.reward, credit.count + 1
            place = place[0].parent
    return found


def retokenized(texts: Texts, choice: Choice) -> int:
    """Return how many tokens of an answer a tokenization of its text would change.

    A record that keeps text, and tokenizes it for training, trains others in their place.
    """
    own, other = choice.token_ids.tolist(), texts.encode(choice.text)
    if own == other:
        return 0
    matcher = difflib.SequenceMatcher(None, own, other, autojunk=False)
    return len(own) - sum(block.size for block in matcher.get_matching_blocks())
