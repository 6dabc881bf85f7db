"""The objective of a run: its loss, advantages, reward shaping, group filter and corrections."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from grpo_components.objective.composition import Penalties
from grpo_components.objective.contracts import advantages_of
from grpo_components.objective.dynamic_sampling import DynamicSampling
from grpo_components.objective.reward_shaping import RewardShaping
from grpo_components.objective.token_advantages import TokenAdvantages
from grpo_components.schedules import Schedule


@dataclass(frozen=True, kw_only=True)
class TrainedObjective:
    """Holds the parts of the objective that trainers compute; sent to the trainers by value."""

    loss: Callable[..., Any]
    """Function: tokens of a micro-batch -> policy losses [N], and metrics [N] by name."""
    penalties: Penalties
    """KL to the reference and entropy bonus, added to the loss."""
    aggregation: Callable[..., Any]
    """Function: number of trained tokens per response [S] -> loss weight of its tokens [S]."""
    off_policy: Callable[..., Any]
    """Function: log ratios trainer/generator [N], response of each token [N] -> weights [N]."""
    token_advantages: TokenAdvantages | None = None
    """Computes the tokens' advantages; None gives each token the advantage of its response."""
    teacher_coeff: float = 0.0
    """Factor of the KL to the teacher, which is subtracted from advantages; 0 without a teacher."""
    needs_reference: bool = False
    """Whether a part of the objective uses a KL to the reference."""
    ptx: Any = None
    """Examples for a supervised loss that is added to the policy loss; None: no supervised loss."""


@dataclass(frozen=True)
class Objective:
    """Holds all parts of a run's objective."""

    trained: TrainedObjective
    advantages: Callable[[NDArray[Any]], NDArray[Any]]
    """Function: shaped rewards [B, G] -> advantages [B, G]."""
    reward_shaping: RewardShaping
    dynamic_sampling: DynamicSampling | None
    """Drops groups whose rewards are all equal; None keeps them."""
    temperature: Schedule
    """Sampling temperature, by training step."""
    doubts: tuple[str, ...] = ()
    """Warnings for the user on the objective's parts, one line each; see `doubts.py`."""
    reward_scores: tuple[str, ...] = ()
    """Lines for the user, one per reward: scores of known or perfect answers and an empty one."""

    def advantages_of(self, rewards: NDArray[Any]) -> NDArray[Any]:
        """Return the advantages [B, G] of shaped rewards [B, G]; see `contracts.advantages_of`."""
        return advantages_of(self.advantages, rewards)
