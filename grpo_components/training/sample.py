"""A trajectory in the trainer's hands: which of its tokens are trained, and with what weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from grpo_components.objective.token_advantages import TokenAdvantages
from grpo_components.trajectory import Trajectory


@dataclass
class Sample:
    """One response of the batch, and what the step adds to its record."""

    trajectory: Trajectory
    mask: NDArray[np.bool_]
    """[R] the tokens that are trained."""
    logged: bool = False
    """Whether its logprobs are for the log of rollouts."""
    loss_weight: float = 0.0
    """Of each token's loss, in the update that is being made."""
    proximal_logprobs: NDArray[np.float32] | None = None
    """[number of trained tokens] of the policy that the step started from."""
    start_logprobs: NDArray[np.float32] | None = None
    """The same, of a logged response that this rank has computed."""
    advantages: NDArray[np.float32] | None = None
    """[number of trained tokens]"""

    @property
    def num_tokens(self) -> int:
        """Tokens that are trained."""
        return int(self.mask.sum())

    @property
    def num_all_tokens(self) -> int:
        """Prompt and response."""
        return len(self.trajectory.prompt_ids) + len(self.trajectory.response_ids)


def spread_advantages(
    samples: Sequence[Sample], token_advantages: TokenAdvantages | None, step: int
) -> None:
    """Set the advantage of each trained token.

    Args:
        samples: of the global batch, the same on every rank.
        token_advantages: makes them; None gives each token that of its response.
        step: training steps done before this one.
    """
    if token_advantages is None:
        for sample in samples:
            advantage = sample.trajectory.advantage
            sample.advantages = np.full(sample.num_tokens, advantage, np.float32)
        return
    trajectories = [sample.trajectory for sample in samples]
    parts = token_advantages(trajectories, [sample.mask for sample in samples], step)
    for sample, part in zip(samples, parts, strict=True):
        assert part.shape == (sample.num_tokens,), "token_advantages: one per trained token"
        sample.advantages = part.astype(np.float32)
