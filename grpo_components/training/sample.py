"""A trajectory in the trainer's hands: which of its tokens are trained, and with what weight."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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

    @property
    def num_tokens(self) -> int:
        """Tokens that are trained."""
        return int(self.mask.sum())

    @property
    def num_all_tokens(self) -> int:
        """Prompt and response."""
        return len(self.trajectory.prompt_ids) + len(self.trajectory.response_ids)
