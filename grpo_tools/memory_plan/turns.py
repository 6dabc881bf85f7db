"""Predicts what a trainer and a generator take on the GPU on which they take turns."""

from __future__ import annotations

from grpo_components.settings import Settings
from grpo_tools.memory_plan.role_memory import Device, RoleMemory, gib

IN_TURNS = "trainer and generator in turns"


def in_turns(
    trainer: RoleMemory, generator: RoleMemory, device: Device, less_cache: str
) -> RoleMemory:
    """Return the memory of a trainer and a generator's worker on one GPU.

    It is that of the larger turn: of all that one role takes, and what stays of the other. Of a
    trainer stay its float32 weights and what a push takes; of a generator that sleeps its CUDA
    context and graphs.
    """
    generating, training = generator.total + trainer.resting, trainer.total + generator.resting
    note = f"{gib(generating)} GiB while it generates, {gib(trainer.resting)} of them the trainer's"
    note += f"; {gib(training)} while it trains, {gib(generator.resting)} of them the generator's"
    return RoleMemory(
        IN_TURNS,
        trainer.count,
        trainer.share,
        max(generating, training),
        parts={},
        notes=[note],
        smaller=trainer.smaller if training > device.nbytes else less_cache,
    )


def start_problem(cfg: Settings, trainer: RoleMemory, device: Device) -> str | None:
    """Return what is wrong with the memory that vLLM wants to be free at its start, if anything."""
    given, most = cfg.generator.gpu_memory_utilization, 1 - trainer.resting / device.nbytes
    if given <= most:
        return None
    problem = f"generator.gpu_memory_utilization: {given:g} given, which must be free when vLLM "
    problem += f"starts, and a trainer's weights take {gib(trainer.resting)} GiB"
    return f"{problem}; allowed: at most {int(100 * most) / 100:g}"
