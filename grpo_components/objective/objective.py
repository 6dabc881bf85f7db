"""The objective of a run: its loss, advantages, reward shaping, group filter and corrections."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from grpo_components.objective.contracts import advantages_of
from grpo_components.objective.dynamic_sampling import DynamicSampling
from grpo_components.objective.penalties import Penalties
from grpo_components.objective.reward_shaping import RewardShaping
from grpo_components.schedules import Schedule


@dataclass(frozen=True)
class Objective:
    """Holds all parts of a run's objective; the trainers get those in `for_trainers`, by value."""

    loss: Callable[..., Any]
    """Function: tokens of a micro-batch -> policy losses [N], and metrics [N] by name."""
    penalties: Penalties
    """KL to the reference and entropy bonus, added to the loss."""
    aggregation: Callable[..., Any]
    """Function: trained tokens of each response [S] -> weight that each of its tokens has [S]."""
    off_policy: Callable[..., Any]
    """Function: log ratios of trainer to generator [N] -> weights of the tokens [N]."""
    ptx: Any
    """Examples for a supervised loss, added to the policy loss; None disables it."""
    advantages: Callable[[NDArray[Any]], NDArray[Any]]
    """Function: shaped rewards [B, G] -> advantages [B, G]."""
    reward_shaping: RewardShaping
    dynamic_sampling: DynamicSampling | None
    """Drops groups whose rewards are all equal; None keeps them."""
    teacher_coeff: float
    """Weight of the teacher's term in the advantages; 0 without a teacher."""
    temperature: Schedule
    """Sampling temperature, by training step."""
    doubts: tuple[str, ...] = ()
    """What looks wrong with a part, one line each, for the user; see `doubts.py`."""

    @property
    def for_trainers(self) -> dict[str, Any]:
        """Keyword arguments for `Trainer`."""
        return {
            "loss": self.loss,
            "penalties": self.penalties,
            "aggregation": self.aggregation,
            "off_policy": self.off_policy,
            "ptx": self.ptx,
            "teacher_coeff": self.teacher_coeff,
            "token_advantages": getattr(self.advantages, "per_token", None),
            "needs_reference": self.needs_reference,
        }

    def advantages_of(self, rewards: NDArray[Any]) -> NDArray[Any]:
        """Return the advantages [B, G] of shaped rewards [B, G]; see `contracts.advantages_of`."""
        return advantages_of(self.advantages, rewards)

    @property
    def needs_reference(self) -> bool:
        """Whether a part of the objective uses a KL to the reference."""
        compared = (self.loss, self.penalties, self.reward_shaping, self.advantages)
        return any(getattr(part, "needs_reference", False) for part in compared)
