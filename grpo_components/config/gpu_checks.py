"""Checks whether the roles of a run fit onto the GPUs of this machine."""

from __future__ import annotations

import torch

from grpo_components.config.cross_checks import kl_sections, needs_reference
from grpo_components.errors import fail
from grpo_components.settings import Settings, teachers_of


def check_gpus(settings: Settings, *, here: bool) -> None:
    """Refuse GPU shares that roles cannot have, and roles that do not fit onto these GPUs."""
    if here and not torch.cuda.is_available():
        fail("device", f"cuda given, and PyTorch {torch.__version__} finds no GPU", "cpu")
    counts = _roles(settings)
    shares = {role: getattr(settings, f"gpus_per_{role}") for role in counts}
    workers = settings.generator.tensor_parallel_size
    if workers > 1 and shares["generator"] < 1:
        problem = f"{shares['generator']:g} given, and each of the {workers} workers of one "
        problem += "generator (generator.tensor_parallel_size) needs a GPU of its own"
        fail("gpus_per_generator", problem, "1 with generator.tensor_parallel_size above 1")
    if counts["trainer"] > 1 and shares["trainer"] <= 0.5:
        problem = f"{shares['trainer']:g} given, and NCCL lets no two trainers share a GPU"
        fail("gpus_per_trainer", problem, "above 0.5 (or num_trainers: 1)")
    memory = settings.generator.gpu_memory_utilization
    holder = "trainer" if settings.colocate else "generator"
    if memory > shares[holder]:
        problem = f"{memory:g} given, more than a {holder}'s share of a GPU"
        fail("generator.gpu_memory_utilization", problem, f"at most gpus_per_{holder}")
    if settings.colocate:  # a generator has no GPU but its trainers'
        del counts["generator"]
    needed = [shares[role] for role, count in counts.items() for _ in range(count)]
    needed += [1.0] * (workers - 1) * counts.get("generator", 0)
    free = [1.0] * len(needed)  # share left of each GPU; as in Ray, none is split over two GPUs
    for share in sorted(needed, reverse=True):
        free[next(i for i, left in enumerate(free) if left >= share - 1e-9)] -= share
    num_needed = sum(left < 1 for left in free)
    if here and num_needed > torch.cuda.device_count():
        problem = " and ".join(f"num_{role}s: {count}" for role, count in counts.items())
        if workers > 1 and not settings.colocate:
            problem += f" with generator.tensor_parallel_size: {workers}"
        problem += f" need {num_needed} GPUs, and there are {torch.cuda.device_count()}"
        key = "num_trainers" if settings.colocate else "num_generators"
        fail(key, problem, "fewer roles, or gpus_per_<role> below 1")


def generator_gpus(settings: Settings) -> float:
    """Return the GPUs of one generator: a share of one, or one for each tensor-parallel worker."""
    return settings.gpus_per_generator * settings.generator.tensor_parallel_size


def _roles(settings: Settings) -> dict[str, int]:
    """Return the number of processes of each role that uses a GPU."""
    trains = not (settings.eval_only or settings.rollout_only)
    counts = {"generator": 0 if settings.train_from else settings.num_generators}
    counts["trainer"] = settings.num_trainers if trains else 0
    if any(map(needs_reference, kl_sections(settings).values())):
        counts["reference"] = settings.num_references
    if num_teachers := teachers_of(settings):
        counts["teacher"] = num_teachers
    if settings.reward_model.path is not None:
        counts["reward_model"] = 1
    return counts
