"""Checks whether the trainers and generators of a config can take turns on the same GPUs."""

from __future__ import annotations

from grpo_components.errors import fail, shown
from grpo_components.settings import Settings


def check_colocated(settings: Settings) -> None:
    """Refuse `colocate: true` with keys that turns rule out."""
    if not settings.colocate:
        return
    for key in ("eval_only", "rollout_only", "train_from"):
        if value := getattr(settings, key):
            fail("colocate", f"true given with {key}: {shown(value)}: no turns to take", "false")
    required = {"max_staleness": 0, "push_every_n_steps": 1, "pull_every_m_rollouts": 1}
    for key, value in required.items():
        if (given := getattr(settings, key)) != value:
            problem = f"{given} given with colocate: true, where a step's groups are all generated "
            fail(key, f"{problem}before it, by the newest weights", f"{value} (or colocate: false)")
    workers = settings.generator.tensor_parallel_size
    if settings.num_trainers != (most := settings.num_generators * workers):
        problem = f"{settings.num_trainers} given with colocate: true, where each trainer shares "
        problem += "its GPU with one generator, or with one of its workers"
        allowed = f"num_generators x generator.tensor_parallel_size = {most}"
        fail("num_trainers", problem, f"{allowed} (or colocate: false)")
    if settings.device == "cuda":
        _check_on_gpus(settings)


def _check_on_gpus(settings: Settings) -> None:
    share, workers = settings.gpus_per_trainer, settings.generator.tensor_parallel_size
    if settings.gpus_per_generator != 1:
        problem = f"{settings.gpus_per_generator:g} given with colocate: true, where a generator "
        fail("gpus_per_generator", f"{problem}has no GPU but its trainers'", "1")
    if share < 1 and workers > 1:
        problem = f"{share:g} given with colocate: true and generator.tensor_parallel_size: "
        fail("gpus_per_trainer", f"{problem}{workers}, whose workers need whole GPUs", "1")
    if settings.generator.kv_cache_gib is None:
        problem = "null given with colocate: true, and what vLLM finds free beside a trainer that "
        fail("generator.kv_cache_gib", f"{problem}starts is chance", "a number")
