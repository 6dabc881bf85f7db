"""Says what each family of roles needs of a joined cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from grpo_components.cluster.ray_cluster import Need
from grpo_components.config.role_arguments import RoleArguments
from grpo_components.settings import Settings, teachers_of


def needs_of(cfg: Settings, arguments: RoleArguments, num_references: int) -> dict[str, Need]:
    """Return the needs of each family of roles; those not named run beside the driver."""
    scorers = int(bool(cfg.reward_model.path))
    needs = {
        "trainer": _need(cfg.num_trainers, arguments.trainer, "PACK"),
        "reference": _need(num_references, arguments.reference, "PACK"),
        "teacher": _need(teachers_of(cfg), arguments.teacher, "PACK"),
        "reward_model": _need(scorers, arguments.reward_model, "PACK"),
        "generator": _need(cfg.num_generators, arguments.generator, "SPREAD"),
    }
    if hosts := hosts_of(cfg, 0):
        del needs["generator"]
        needs["trainer"] = replace(needs["trainer"], together=len(hosts), guests="generator")
    return {family: need for family, need in needs.items() if need.count}


def hosts_of(cfg: Settings, generator: int) -> list[str]:
    """Return the names of the trainers whose GPUs a generator shares; empty if it has its own."""
    if not (cfg.colocate and cfg.device == "cuda"):
        return []
    workers = cfg.generator.tensor_parallel_size
    return [f"trainer_{generator * workers + worker}" for worker in range(workers)]


def _need(count: int, arguments: Mapping[str, Any], strategy: Literal["PACK", "SPREAD"]) -> Need:
    """Return the need of `count` processes with the same arguments for `Cluster.spawn`."""
    num_gpus = arguments.get("num_gpus", 0)
    resources = {"GPU": num_gpus} if num_gpus else {"CPU": arguments.get("cpu_threads", 1)}
    return Need(count, resources, strategy)
