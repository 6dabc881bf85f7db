"""The objective that a config asks for: loss, advantages, and what shapes, filters and corrects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from grpo_components.config.building import build
from grpo_components.config.component_trial import try_components
from grpo_components.objective.contracts import advantages_of
from grpo_components.objective.dynamic_sampling import DynamicSampling
from grpo_components.objective.reward_shaping import RewardShaping
from grpo_components.objective.schedules import Schedule, as_schedule
from grpo_components.settings import Settings

_SHAPING = ("kl_coeff", "overlong_tokens", "overlong_penalty")


@dataclass(frozen=True)
class Objective:
    """What is optimized; the trainers get `for_trainers` by value."""

    loss: Callable[..., Any]
    """Tokens of a micro-batch -> losses [N] and metrics [N]."""
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
        compared = (self.loss, self.reward_shaping, self.advantages)
        return any(getattr(part, "needs_reference", False) for part in compared)


def build_reward_shaping(cfg: Settings) -> RewardShaping:
    """Build what takes penalties off the rewards; without any it changes nothing.

    Args:
        cfg: checked by preflight.
    """
    settings = {key: getattr(cfg.reward_shaping, key) for key in _SHAPING}
    return RewardShaping(**settings, max_response_tokens=cfg.generator.max_response_tokens)


def build_objective(cfg: Settings, tokenizer: Any, dataset: Any) -> Objective:
    """Build every part from its node, and call each component of the config once.

    Args:
        cfg: checked by preflight.
        tokenizer: for the examples of the supervised loss.
        dataset: prompts to train on.

    Raises:
        ValueError: naming the key of what cannot be built, or is no component of its kind.
    """
    dynamic = cfg.dynamic_sampling
    objective = Objective(
        loss=build("loss", cfg.loss),
        aggregation=build("aggregation", cfg.aggregation),
        off_policy=build("off_policy", cfg.off_policy),
        ptx=build("ptx", cfg.ptx, tokenizer) if cfg.ptx else None,
        advantages=build("advantages", cfg.advantages),
        reward_shaping=build_reward_shaping(cfg),
        dynamic_sampling=DynamicSampling(dynamic.max_discarded) if dynamic.enabled else None,
        temperature=as_schedule("generator.temperature", cfg.generator.temperature),
    )
    parts = {"loss": objective.loss, "aggregation": objective.aggregation}
    parts |= {"off_policy": objective.off_policy, "ptx": objective.ptx}
    try_components(cfg, tokenizer, dataset, objective.advantages, objective.reward_shaping, parts)
    return objective
