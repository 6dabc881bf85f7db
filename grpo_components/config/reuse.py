"""Builds the reuse of trained groups, and checks its config section `replay_generation`."""

from __future__ import annotations

from grpo_components.errors import fail
from grpo_components.exchange.group_reuse import GroupReuse, reused_per_step
from grpo_components.exchange.staleness import StalenessContract
from grpo_components.settings import Settings


def build_reuse(cfg: Settings) -> GroupReuse:
    """Build what chooses the groups that steps train again; without the section, none."""
    contract = StalenessContract(cfg.max_staleness, cfg.groups_per_step)
    rule = cfg.replay_generation
    return GroupReuse(contract, **rule.model_dump()) if rule else GroupReuse(contract)


def check_reuse(settings: Settings) -> None:
    """Refuse a reuse of groups that the run could never, or not rightly, follow."""
    rule = settings.replay_generation
    if rule is None:
        return
    if settings.max_staleness == 0:
        problem = "given with max_staleness: 0, by which no trained group is fresh enough again"
        fail("replay_generation", problem, "null, or max_staleness: 1 or more")
    for key in ("train_from", "rollout_only"):
        if getattr(settings, key):
            problem = f"given with {key}, which runs one half of a run alone"
            fail("replay_generation", problem, "null")
    if not reused_per_step(rule.share, settings.groups_per_step):
        batch = settings.groups_per_step
        problem = f"{rule.share:g} given with groups_per_step: {batch}, less than one group"
        allowed = f"at least {1 / batch:.4g}" if batch > 1 else "groups_per_step: 2 or more"
        fail("replay_generation.share", problem, allowed)
