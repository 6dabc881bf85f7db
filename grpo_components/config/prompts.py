"""Builds the endless stream of a run's prompts."""

from __future__ import annotations

from typing import Any

from grpo_components.data.curriculum import MAX_PROMPTS, CurriculumRule
from grpo_components.data.prompt_curriculum import PromptCurriculum
from grpo_components.data.prompt_stream import PromptStream
from grpo_components.errors import fail
from grpo_components.settings import Settings


def build_prompts(cfg: Settings, dataset: Any) -> PromptStream | PromptCurriculum:
    """Build the stream from which the ledger takes the prompt of each new group.

    Args:
        cfg: settings checked by preflight.
        dataset: data set to train on.

    Raises:
        ConfigError: the data set is too large for a curriculum.
    """
    if cfg.curriculum is None:
        return PromptStream(dataset, shuffle=cfg.shuffle, seed=cfg.seed)
    if len(dataset) > MAX_PROMPTS:
        problem = f"given with a data set of {len(dataset)} prompts"
        fail("curriculum", problem, f"null, or at most {MAX_PROMPTS} prompts")
    rule = CurriculumRule(**cfg.curriculum.model_dump())
    return PromptCurriculum(dataset, rule, cfg.seed)


def check_curriculum(settings: Settings) -> None:
    """Refuse a curriculum whose band is empty, or that the run could not follow."""
    rule = settings.curriculum
    if rule is None:
        return
    if rule.low > rule.high:
        problem = f"{rule.low:g} given with curriculum.high: {rule.high:g}"
        fail("curriculum.low", problem, f"at most {rule.high:g}")
    if not settings.shuffle:
        problem = "false given with a curriculum, which draws the prompts at random"
        fail("shuffle", problem, "true, or curriculum: null")
    if settings.train_from:
        problem = "given with train_from, whose groups are recorded"
        fail("curriculum", problem, "null")
