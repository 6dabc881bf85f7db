"""A response in a training step: which of its tokens are trained, and with what weight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grpo_components.objective.component_errors import ComponentError
from grpo_components.objective.token_advantages import TokenAdvantages
from grpo_components.trajectory import Trajectory


@dataclass
class TrainSample:
    """One response of the batch, with what the training step computes for it."""

    trajectory: Trajectory
    mask: NDArray[np.bool_]
    """[R] True for tokens that are trained."""
    number: int = 0
    """Number of the response in its group, from 0."""
    logged: bool = False
    """Whether the rollout log gets the logprobs of its tokens."""
    loss_weight: float = 0.0
    """Weight of each token's loss in the current update."""
    proximal_logprobs: NDArray[np.float32] | None = None
    """[N] logprobs of the N trained tokens, by the policy that the step started from."""
    start_logprobs: NDArray[np.float32] | None = None
    """[N] the same logprobs, for the log; set for a logged response that this rank computed."""
    advantages: NDArray[np.float32] | None = None
    """[N] advantages of the N trained tokens."""

    @property
    def num_tokens(self) -> int:
        """Number of trained tokens N."""
        return int(self.mask.sum())


def make_samples(
    trajectories: Sequence[Trajectory],
    advantages: NDArray[Any],
    trained_tokens: Callable[[Trajectory], NDArray[np.bool_]],
    num_logged: int,
) -> list[TrainSample]:
    """Build the samples of a batch.

    Args:
        trajectories: S trajectories of the batch, group by group.
        advantages: [S] numbers, one per trajectory.
        trained_tokens: function of a trajectory; returns [R] bool, which of its tokens are trained.
        num_logged: number of first samples whose token logprobs are logged.

    Raises:
        ComponentError: the shape of `advantages` is not [S].
    """
    if np.shape(advantages) != (len(trajectories),):
        problem = f"shape {np.shape(advantages)} given for {len(trajectories)} responses"
        raise ComponentError(f"advantages: {problem}; allowed: one number per response")
    samples: list[TrainSample] = []
    in_group: Counter[int] = Counter()
    for trajectory, advantage in zip(trajectories, advantages.tolist(), strict=True):
        trajectory.advantage = advantage
        number, logged = in_group[trajectory.group_id], len(samples) < num_logged
        samples.append(TrainSample(trajectory, trained_tokens(trajectory), number, logged))
        in_group[trajectory.group_id] += 1
    return samples


def spread_advantages(
    samples: Sequence[TrainSample], token_advantages: TokenAdvantages | None, step: int
) -> None:
    """Set the advantage of each trained token.

    Args:
        samples: samples of the global batch, the same on every rank.
        token_advantages: function that computes the tokens' advantages; None gives each token its
            response's advantage.
        step: number of training steps done before this one.

    Raises:
        ComponentError: the number of advantages is not the number of trained tokens.
    """
    if token_advantages is None:
        for sample in samples:
            advantage = sample.trajectory.advantage
            sample.advantages = np.full(sample.num_tokens, advantage, np.float32)
        return
    trajectories = [sample.trajectory for sample in samples]
    parts = token_advantages(trajectories, [sample.mask for sample in samples], step)
    for sample, part in zip(samples, parts, strict=True):
        if part.shape != (sample.num_tokens,):
            problem = f"per_token returned shape {part.shape} for {sample.num_tokens} tokens"
            raise ComponentError(f"advantages: {problem}; allowed: one number per token")
        sample.advantages = part.astype(np.float32)
