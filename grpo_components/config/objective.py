"""Builds the objective of a config: loss, advantages, reward shaping, filters and corrections."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from inspect import Parameter
from typing import Any

from omegaconf import OmegaConf

from grpo_components.config.components import build, parameters_of
from grpo_components.config.preflight import check_gpus
from grpo_components.config.trial import try_components
from grpo_components.errors import DryRunEnd, fail
from grpo_components.objective.composition import Penalties
from grpo_components.objective.dynamic_sampling import DynamicSampling
from grpo_components.objective.losses import at_step
from grpo_components.objective.objective import Objective, TrainedObjective
from grpo_components.objective.reward_shaping import RewardShaping
from grpo_components.schedules import as_schedule
from grpo_components.settings import CLIP, PENALTIES, Settings

_NAMED = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


def build_loss(cfg: Settings, default_loss: Callable[..., Any]) -> Callable[..., Any]:
    """Build the policy loss: the component that the config names, else the recipe's own."""
    section = {str(key): cfg.loss[key] for key in cfg.loss if key not in PENALTIES}
    if "_component_" in section:
        return build("loss", OmegaConf.create(section))
    taken = parameters_of(default_loss)
    for name in (p.name for p in taken[1:] if p.default is p.empty and p.kind in _NAMED):
        if name not in section:
            allowed = f"in the recipe, partial(my_loss, {name}=cfg.user.{name})"
            fail("loss", f"the recipe's loss takes {name}, and nothing gives it", allowed)
    if all(parameter.kind != parameter.VAR_KEYWORD for parameter in taken):
        for key in section.keys() - {parameter.name for parameter in taken}:  # a fork has no clip
            if section.pop(key) != CLIP.get(key):
                fail(f"loss.{key}", "given, and the recipe's loss does not take it", "no such key")
    return at_step(default_loss, section)


def build_penalties(cfg: Settings) -> Penalties:
    """Build the KL and entropy terms that are added to every loss."""
    return Penalties(**{key: cfg.loss[key] for key in PENALTIES})


def build_objective(
    cfg: Settings,
    default_loss: Callable[..., Any],
    tokenizer: Any,
    dataset: Any,
    held_out: Any,
    *,
    advantages: Callable[..., Any] | None = None,
) -> Objective:
    """Build the objective, and call each of its components once, so that mistakes show early.

    `advantages` replaces the component that the config names. With `dry_run: true`, the run ends
    here, and reports what it would do.
    """
    dynamic, shaping = cfg.dynamic_sampling, cfg.reward_shaping
    loss, penalties = build_loss(cfg, default_loss), build_penalties(cfg)
    estimator: Any = advantages or build("advantages", cfg.advantages)
    longest = cfg.generator.max_response_tokens
    reward_shaping = RewardShaping(
        shaping.kl_coeff, longest, shaping.overlong_tokens, shaping.overlong_penalty
    )
    compared = (loss, penalties, reward_shaping, estimator)
    objective = Objective(
        trained=TrainedObjective(
            loss=loss,
            penalties=penalties,
            aggregation=build("aggregation", cfg.aggregation),
            off_policy=build("off_policy", cfg.off_policy),
            token_advantages=getattr(estimator, "per_token", None),
            teacher_coeff=cfg.teacher.coeff if cfg.teacher else 0.0,
            needs_reference=any(getattr(part, "needs_reference", False) for part in compared),
            ptx=build("ptx", cfg.ptx, tokenizer) if cfg.ptx else None,
        ),
        advantages=estimator,
        reward_shaping=reward_shaping,
        dynamic_sampling=DynamicSampling(dynamic.max_discarded) if dynamic.enabled else None,
        temperature=as_schedule("generator.temperature", cfg.generator.temperature),
    )
    if objective.trained.needs_reference and not cfg.eval_only:
        if not (cfg.num_references or cfg.lora):
            fail("num_references", "0 given, and loss or advantages need one", "at least 1")
        if cfg.device == "cuda":
            check_gpus(cfg, here=cfg.ray.address is None, is_compared=True)
    doubts, scores = try_components(cfg, tokenizer, dataset, held_out, objective)
    objective = replace(objective, doubts=tuple(doubts), reward_scores=tuple(scores))
    if cfg.dry_run:
        from grpo_tools.memory_plan.dry_run import plan  # a run needs no tools

        raise DryRunEnd(*plan(cfg, dataset, held_out, objective))
    return objective
