"""Defines the stages of a response: sample, request to an engine, completion, trajectory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from grpo_components.exchange.weight_probe import ProbeReading
from grpo_components.rewards.pool import Score
from grpo_components.trajectory import Prompt, Trajectory

BASE_VERSION = 0
"""Policy version of the weights that an engine loads first."""
Scored = tuple[list[Trajectory], Score, str | None]
"""A scored response: its trajectory (several if an agent's session forked), its score, and its text
if it is a single turn."""
Watch = Callable[[Sequence[int]], bool]
"""Function that gets the tokens sampled so far for a request, and returns whether to stop here."""


def sampling_seed(*identity: int) -> int:
    """Compute a seed from the numbers that identify its use: run's seed, purpose, group, sample."""
    return int(np.random.SeedSequence(identity).generate_state(1, np.uint64)[0] >> 1)


@dataclass(frozen=True, slots=True)
class Sample:
    """One response to sample: its prompt, its random seed, and its epoch, group and attempt."""

    prompt: Prompt
    name: str
    """Name in the engine's schedule and in errors."""
    seed: int
    temperature: float = 1.0
    epoch: int = 0
    group_id: int = 0
    attempt: int = 0
    ended: Callable[[], None] = lambda: None
    """Function to call once the response is scored, to make room for another. Further calls do
    nothing."""
    scoring: AbstractAsyncContextManager[Any] = field(default_factory=nullcontext)
    """Context manager to enter while a single-turn response is scored. In an evaluation, it limits
    how many responses are scored at once."""
    evaluates: bool = False
    """Whether the response is for an evaluation, not for training."""

    def record(
        self,
        prompt_ids: NDArray[np.int64],
        turns: Iterable[Sequence[Any]],
        finish_reason: str,
        score: Score,
        session: dict[str, Any] | None = None,
    ) -> Trajectory:
        """Make the trajectory of a response; it is marked as failed if the score has an error.

        A turn is (token ids, logprobs, versions) of the policy, or (token ids,) of the environment.
        """
        ids, masks = [np.empty(0, np.int64)], [np.empty(0, np.bool_)]
        logprobs, versions = [np.empty(0, np.float32)], [np.empty(0, np.int32)]
        for token_ids, *sampled in turns:
            size = len(token_ids)
            ids.append(np.asarray(token_ids, np.int64))
            masks.append(np.full(size, bool(sampled)))
            logprobs.append(sampled[0] if sampled else np.zeros(size, np.float32))
            versions.append(sampled[1] if sampled else np.full(size, -1, np.int32))
        if score.error is None and not math.isfinite(score.reward):
            score = failure(f"the environment gave the reward {score.reward}")
        return Trajectory(
            prompt_ids=prompt_ids,
            response_ids=np.concatenate(ids),
            response_mask=np.concatenate(masks),
            generator_logprobs=np.concatenate(logprobs),
            token_versions=np.concatenate(versions),
            prompt_index=self.prompt["prompt_index"],
            epoch=self.epoch,
            group_id=self.group_id,
            attempt=self.attempt,
            temperature=self.temperature,
            finish_reason="error" if score.error else finish_reason,  # pyright: ignore
            reward=score.reward,
            reward_terms=score.terms,
            success=score.success,
            error=score.error,
            session=session,
        )

    def failed(self, error: str, session: dict[str, Any] | None = None) -> Scored:
        """Return this response as failed: without tokens, with `error` as the reason."""
        prompt_ids, score = np.asarray(self.prompt["prompt_ids"]), failure(error)
        return [self.record(prompt_ids, (), "error", score, session)], score, None


@dataclass(frozen=True, slots=True)
class Request:
    """A request to an engine, for a response or for one turn of it."""

    prompt_ids: list[int]
    max_tokens: int
    temperature: float
    seed: int
    stop_token_ids: Sequence[int]
    truncation: Mapping[str, float]
    """Sampling settings such as `top_p`, by vLLM's names; see `settings.TRUNCATION`."""
    watch: Watch | None


@dataclass(frozen=True)
class Completion:
    """What the engine sampled for one request."""

    token_ids: NDArray[np.int64]
    """[R] sampled tokens, including the stop token if one was sampled."""
    logprobs: NDArray[np.float32]
    """[R] log-probability of each token in nats, under the distribution it was sampled from."""
    token_versions: NDArray[np.int32]
    """[R] version of the policy that sampled each token."""
    finish_reason: Literal["stop", "length", "abort"]
    cached_tokens: int = 0
    """Tokens of the prompt whose keys and values were in the prefix cache."""


Result = Completion | ProbeReading
"""An engine's answer to a request, or to the weight probe (test tokens, see weight_probe.py)."""


def failure(error: str) -> Score:
    """Return the score of a failed response: the reward is NaN, `error` is the reason."""
    return Score(math.nan, {}, False, error)


def reward_use(scored: Iterable[Scored]) -> dict[str, float]:
    """Add up what scoring these responses used (judge requests, tokens); see `Score.used`."""
    total: Counter[str] = Counter()
    for _, score, _ in scored:
        total.update(score.used)  # pyright: ignore -- numbers
    return dict(total)
