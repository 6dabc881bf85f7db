"""Checks a whole config before anything starts; the first problem becomes a one-line error."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator, Sequence

from omegaconf import DictConfig

from grpo_components._tune_run import LOADED
from grpo_components.config.components import check_components, refuse_missing
from grpo_components.config.files import check_files
from grpo_components.config.reading import read_config_file, read_settings
from grpo_components.errors import fail
from grpo_components.quiet import quiet_libraries
from grpo_components.settings import Settings, needs_reference, processes_of


def parse(recipe_main: Callable[[DictConfig], None]) -> Callable[[], None]:
    """Decorator: call a recipe's main function with the config that the command line names."""

    @functools.wraps(recipe_main)
    def main() -> None:
        LOADED.set()
        parser = argparse.ArgumentParser(description=main.__doc__)
        parser.add_argument("--config", required=True, help="name in `tune ls`, or a file")
        given, overrides = parser.parse_known_args()
        recipe_main(read_config_file(given.config, overrides))

    return main


def read_config(cfg: DictConfig) -> Settings:
    """Return a config as typed settings with all defaults; raise `ConfigError` if it cannot run.

    Adds the current folder to `sys.path`, from which users' components are imported, and sets the
    libraries' logging to the config's `log_level`.
    """
    settings = check_values_and_files(cfg)
    check_what_is_imported(settings)
    quiet_libraries(settings.log_level)
    return settings


def check_values_and_files(cfg: DictConfig) -> Settings:
    """Return a config as typed settings; refuse wrong values and missing files.

    Imports nothing that takes long.
    """
    settings = read_settings(cfg)
    check_files(settings)
    refuse_missing(settings)
    return settings


def check_what_is_imported(settings: Settings) -> None:
    """Run the checks that import torch or torchtune: GPUs, checkpoints, recordings, components."""
    from grpo_components.config.files import check_disk, check_output
    from grpo_components.config.replayed import check_replay
    from grpo_components.offline.partial_runs import check_partial_run
    from grpo_components.records.resume import check_resume

    if settings.device == "cuda":
        check_gpus(settings, here=settings.ray.address is None)
    check_output(settings)
    check_resume(settings.model_dump(), settings.kl_sections)
    check_replay(settings, read_settings)
    check_partial_run(settings)
    check_components(settings)
    if settings.trains:
        check_disk(settings)


# ---- GPUs ---------------------------------------------------------------------------------------


def check_gpus(settings: Settings, *, here: bool, is_compared: bool = False) -> None:
    """Refuse `gpus_per_<role>` that cannot work; if `here`, also more GPUs than the machine has.

    `here`: whether all roles run on this machine. `is_compared`: whether the run needs a reference
    even if the config has no KL term.
    """
    import torch

    if here and not torch.cuda.is_available():
        fail("device", f"cuda given, and PyTorch {torch.__version__} finds no GPU", "cpu")
    is_compared = is_compared or any(map(needs_reference, settings.kl_sections.values()))
    counts = processes_of(settings, is_compared)
    shares = {role: getattr(settings, f"gpus_per_{role}") for role in counts}
    counts["trainer"] *= settings.trains  # stand-ins use no GPU
    counts["generator"] *= not settings.train_from
    workers = settings.generator.tensor_parallel_size
    if workers > 1 and shares["generator"] < 1:
        why = f"and each of the {workers} workers of a generator needs a whole GPU"
        allowed = "1 with generator.tensor_parallel_size above 1"
        fail("gpus_per_generator", f"{shares['generator']:g} given, {why}", allowed)
    if counts["trainer"] > 1 and shares["trainer"] <= 0.5:
        why = "and NCCL lets no two trainers share a GPU"
        allowed = "above 0.5 (or num_trainers: 1)"
        fail("gpus_per_trainer", f"{shares['trainer']:g} given, {why}", allowed)
    holder = "trainer" if settings.colocate else "generator"
    if (used := settings.generator.gpu_memory_utilization) > shares[holder]:
        problem = f"{used:g} given, more than a {holder}'s share of a GPU"
        fail("generator.gpu_memory_utilization", problem, f"at most gpus_per_{holder}")
    counts["generator"] *= not settings.colocate  # it then uses the trainers' GPUs
    needed = [shares[role] for role, count in counts.items() for _ in range(count)]
    needed += [1.0] * (workers - 1) * counts["generator"]
    num_needed = len(set(gpus_of(needed)))
    if here and num_needed > torch.cuda.device_count():
        problem = " and ".join(f"num_{role}s: {count}" for role, count in counts.items() if count)
        problem += f" need {num_needed} GPUs, and there are {torch.cuda.device_count()}"
        key = "num_trainers" if settings.colocate else "num_generators"
        fail(key, problem, "fewer roles, or gpus_per_<role> below 1")


def gpus_of(shares: Sequence[float]) -> Iterator[int]:
    """Yield the number of the GPU that Ray gives each process; `shares` are in starting order.

    Ray takes the fullest GPU that has room, and splits no share over two.
    """
    free = [1.0] * len(shares)
    for share in shares:
        gpu = min((i for i, left in enumerate(free) if left >= share - 1e-9), key=free.__getitem__)
        free[gpu] -= share
        yield gpu
