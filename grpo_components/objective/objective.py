"""What a run optimizes: its loss, its advantages, and what shapes, filters and corrects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from grpo_components.objective.contracts import advantages_of
from grpo_components.objective.dynamic_sampling import DynamicSampling
from grpo_components.objective.penalties import Penalties
from grpo_components.objective.reward_shaping import RewardShaping
from grpo_components.objective.schedules import Schedule


@dataclass(frozen=True)
class Objective:
    """What is optimized; the trainers get `for_trainers` by value."""

    loss: Callable[..., Any]
    """Tokens of a micro-batch -> policy losses [N] and metrics [N]."""
    penalties: Penalties
    """KL to the reference and entropy bonus, added to the loss."""
    aggregation: Callable[..., Any]
    """Trained tokens of each response [S] -> weight of each token's loss [S]."""
    off_policy: Callable[..., Any]
    """Log ratios [N] of trainer to generator -> weights [N]."""
    ptx: Any
    """Examples of a supervised loss beside the policy's; None has none."""
    advantages: Callable[[NDArray[Any]], NDArray[Any]]
    """Shaped rewards [B, G] -> advantages [B, G]."""
    reward_shaping: RewardShaping
    dynamic_sampling: DynamicSampling | None
    """Drops groups whose rewards are all equal; None keeps them."""
    temperature: Schedule
    """Of sampling, by training step."""

    @property
    def for_trainers(self) -> dict[str, Any]:
        """Keyword arguments of `Trainer`."""
        return {
            "loss": self.loss,
            "penalties": self.penalties,
            "aggregation": self.aggregation,
            "off_policy": self.off_policy,
            "ptx": self.ptx,
            "token_advantages": getattr(self.advantages, "per_token", None),
        }

    def advantages_of(self, rewards: NDArray[Any]) -> NDArray[Any]:
        """Shaped rewards [B, G] -> advantages [B, G], checked; see `contracts.advantages_of`."""
        return advantages_of(self.advantages, rewards)

    @property
    def needs_reference(self) -> bool:
        """Whether loss or rewards have a KL to the reference."""
        compared = (self.loss, self.penalties, self.reward_shaping, self.advantages)
        return any(getattr(part, "needs_reference", False) for part in compared)
