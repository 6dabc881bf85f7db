"""Joins the sampled turns and the score of one response into a `Trajectory`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from grpo_components.rewards.pool import Score
from grpo_components.rollout.completions import Completion
from grpo_components.trajectory import Trajectory

if TYPE_CHECKING:  # worlds of users import this module
    from grpo_components.agents.conversation import SessionPart
    from grpo_components.rollout.engine import Engine
    from grpo_components.settings import GeneratorSettings

Prompt = dict[str, Any]
"""One row of a prompt data set: prompt_index, prompt_ids [P], prompt_text and answer, and the
other columns of the row. The generator adds `seed`, for anything random in the environment."""


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
    """Function to call once the response is scored; further calls do nothing."""
    evaluates: bool = False
    """Whether it is sampled for an evaluation, not for training."""


def next_turn(
    engine: Engine,
    settings: GeneratorSettings,
    sample: Sample,
    temperature: float,
    tokens: list[int],
    used: int,
) -> Future[Completion]:
    """Request a sample's next turn; the last `used` of the `tokens` belong to its response."""
    return engine.submit(
        tokens,
        max_tokens=settings.max_response_tokens - used,
        temperature=temperature,
        # A later turn must not repeat the random numbers of the first.
        seed=sampling_seed(sample.seed, used) if used else sample.seed,
        stop_token_ids=settings.stop_token_ids or (),
        truncation=settings.truncation,
        name=sample.name,
    )


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
        """The field `session` of the trajectory; None without an agent."""
        self.others: list[SlotRollout] = []
        """Further trajectories of the session."""

    @classmethod
    def failed(cls, prompt_ids: NDArray[np.int64], error: str) -> SlotRollout:
        """Make the slot of a failed rollout: a failed sample without response tokens."""
        slot = cls(prompt_ids)
        slot.finish_reason, slot.done = "error", True
        slot.score = Score(math.nan, {}, False, error)
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

    def extend(self, turn: Completion, added: Sequence[int] | NDArray[np.int64]) -> None:
        """Append one turn of the policy, and the environment's tokens after it."""
        own, others = len(turn.token_ids), len(added)
        mask = np.repeat([True, False], [own, others])
        logprobs = turn.logprobs, np.zeros(others, np.float32)
        versions = turn.token_versions, np.full(others, -1, np.int32)
        added = np.asarray(added, np.int64)
        self.response_ids = np.concatenate([self.response_ids, turn.token_ids, added])
        self.response_mask = np.concatenate([self.response_mask, mask])
        self.logprobs = np.concatenate([self.logprobs, *logprobs])
        self.versions = np.concatenate([self.versions, *versions])
        self.finish_reason = turn.finish_reason

    def end(self, score: Score) -> None:
        """End the response with its score."""
        self.score, self.done = score, True
        if score.error is None and not math.isfinite(score.reward):
            why = f"the environment gave the reward {score.reward}"
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
    """Add up what the rewards used for these responses; see `Score.used`."""
    total: Counter[str] = Counter()
    for slot in slots:
        total.update(slot.score.used if slot.score else {})  # pyright: ignore -- numbers
    return dict(total)
