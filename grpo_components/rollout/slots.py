"""Joins what is sampled and scored for one response into a `Trajectory`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from grpo_components.rewards.pool import Score
from grpo_components.rollout.completions import Completion
from grpo_components.trajectory import Trajectory

if TYPE_CHECKING:  # only where agents run
    from grpo_components.agents.conversation import SessionPart

Prompt = dict[str, Any]


def sampling_seed(*identity: int) -> int:
    """Return a sample's seed, computed from its identity (seed, purpose, group, sample) only."""
    return int(np.random.SeedSequence(identity).generate_state(1, np.uint64)[0] >> 1)


@dataclass(frozen=True, slots=True)
class Sample:
    """A response to be sampled."""

    prompt: Prompt
    name: str
    """Name in the engine's schedule and in errors."""
    seed: int
    ended: Callable[[], None] = lambda: None
    """Function to call once the response is scored; more calls do nothing."""
    evaluates: bool = False
    """Whether it is sampled for an evaluation, and not trained."""


class SlotRollout:
    """Joins the turns of one slot into one response."""

    def __init__(self, prompt_ids: NDArray[np.int64]) -> None:
        self.prompt_ids = prompt_ids
        self.response_ids = np.empty(0, np.int64)
        self.response_mask = np.empty(0, np.bool_)
        self.logprobs = np.empty(0, np.float32)
        self.versions = np.empty(0, np.int32)
        self.finish_reason = ""
        self.score: Score | None = None
        self.done = False
        self.text: str | None = None
        """The response as text, if it is one turn."""
        self.session: dict[str, Any] | None = None
        """What the record says of an agent's session; None without an agent."""
        self.others: list[SlotRollout] = []
        """Further trajectories of the session."""

    @classmethod
    def failed(cls, prompt_ids: NDArray[np.int64], error: str) -> SlotRollout:
        """Make the slot of a rollout that failed: a failed sample without response tokens."""
        slot = cls(prompt_ids)
        slot.finish_reason, slot.done = "error", True
        slot.score = Score(math.nan, {}, False, error)
        return slot

    @classmethod
    def of_turn(
        cls, prompt_ids: NDArray[np.int64], turn: Completion, text: str, score: Score
    ) -> SlotRollout:
        """Make the slot of a response that is one turn."""
        slot = cls(prompt_ids)
        slot.response_ids, slot.response_mask = turn.token_ids, np.ones(len(turn.token_ids), bool)
        slot.logprobs, slot.versions = turn.logprobs, turn.token_versions
        slot.finish_reason, slot.score, slot.done, slot.text = turn.finish_reason, score, True, text
        return slot

    @classmethod
    def of_session(cls, part: SessionPart, score: Score, session: dict[str, Any]) -> SlotRollout:
        """Make a slot of one trajectory of an agent's session."""
        slot = cls(part.prompt_ids)
        slot.response_ids, slot.response_mask = part.response_ids, part.response_mask
        slot.logprobs, slot.versions = part.logprobs, part.versions
        slot.finish_reason, slot.score, slot.done = part.finish_reason, score, True
        slot.session = session
        return slot

    def extend(self, turn: Any) -> None:
        """Append one turn of the policy and the environment's tokens after it."""
        after = turn["next"]
        response = turn["response"].numpy()
        known = np.concatenate([self.prompt_ids, self.response_ids, response])
        if not np.array_equal(after["tokens"].numpy()[: len(known)], known):
            raise ValueError("the environment changed tokens of earlier turns")
        added = after["tokens"].numpy()[len(known) :]
        self.response_ids = np.concatenate([self.response_ids, response, added])
        self.response_mask = np.concatenate(
            [self.response_mask, np.ones(len(response), bool), np.zeros(len(added), bool)]
        )
        self.logprobs = np.concatenate(
            [self.logprobs, turn["logprobs"].numpy(), np.zeros(len(added), np.float32)]
        )
        self.versions = np.concatenate(
            [self.versions, turn["versions"].numpy(), np.full(len(added), -1, np.int32)]
        )
        # The environment's reason takes precedence: it knows limits that the policy does not.
        has_reason = "finish_reason" in after.keys()  # noqa: SIM118 -- of a TensorDict
        self.finish_reason = (after if has_reason else turn)["finish_reason"]
        self.done = bool(after["done"])
        if self.done:
            self.score = after["score"]
            if not isinstance(self.score, Score):
                raise TypeError(f"the environment ended a slot with score {self.score!r:.200}")
            if self.score.error is None and not math.isfinite(self.score.reward):
                why = f"the environment gave the reward {self.score.reward}"
                self.score = Score(math.nan, {}, False, why)

    def trajectory(
        self, prompt: Prompt, *, epoch: int, group_id: int, attempt: int, temperature: float
    ) -> Trajectory:
        """Convert the slot to a `Trajectory`; if it failed, the finish_reason is `error`."""
        assert self.score is not None, "the slot is not done"
        trajectory = Trajectory(
            prompt_ids=self.prompt_ids,
            response_ids=self.response_ids,
            response_mask=self.response_mask,
            generator_logprobs=self.logprobs,
            token_versions=self.versions,
            prompt_index=prompt["prompt_index"],
            epoch=epoch,
            group_id=group_id,
            attempt=attempt,
            temperature=temperature,
            finish_reason="error" if self.score.error else self.finish_reason,  # pyright: ignore
            reward=self.score.reward,
            reward_terms=self.score.terms,
            success=self.score.success,
            error=self.score.error,
            session=self.session,
        )
        trajectory.check()
        return trajectory


def reward_use(slots: Iterable[SlotRollout]) -> dict[str, float]:
    """Add up what the rewards used for some responses, see `Score.used`."""
    total: Counter[str] = Counter()
    for slot in slots:
        total.update(slot.score.used if slot.score else {})  # pyright: ignore -- numbers
    return dict(total)
