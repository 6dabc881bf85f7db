"""Says what each family of roles needs of a joined cluster: resources, and files on its nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from grpo_components.cluster.placement import Need
from grpo_components.config.role_arguments import RoleArguments
from grpo_components.replay.recorded_run import replayed_run
from grpo_components.settings import Settings, teachers_of


def needs_of(cfg: Settings, arguments: RoleArguments, num_references: int) -> dict[str, Need]:
    """Return the needs of each family of roles; those not named run beside the driver."""
    policy = {"base_model_path": cfg.base_model_path}
    generator = policy | _read_by_generators(cfg)
    teacher = {"teacher.path": cfg.teacher.path if cfg.teacher else ""}
    scorer = {"reward_model.path": cfg.reward_model.path or ""}
    needs = {
        "trainer": _need(cfg.num_trainers, arguments.trainer, "PACK", policy),
        "reference": _need(num_references, arguments.reference, "PACK", policy),
        "teacher": _need(teachers_of(cfg), arguments.teacher, "PACK", teacher),
        "reward_model": _need(int(any(scorer.values())), arguments.reward_model, "PACK", scorer),
        "generator": _need(cfg.num_generators, arguments.generator, "SPREAD", generator),
    }
    if hosts := hosts_of(cfg, 0):
        del needs["generator"]
        shared = {"paths": generator, "together": len(hosts), "guests": "generator"}
        needs["trainer"] = replace(needs["trainer"], **shared)
    return {family: need for family, need in needs.items() if need.count}


def hosts_of(cfg: Settings, generator: int) -> list[str]:
    """Return the names of the trainers whose GPUs a generator shares; empty if it has its own."""
    if not (cfg.colocate and cfg.device == "cuda"):
        return []
    workers = cfg.generator.tensor_parallel_size
    return [f"trainer_{generator * workers + worker}" for worker in range(workers)]


def _read_by_generators(cfg: Settings) -> dict[str, str]:
    """Return the files that only generators read, by config key."""
    found = {
        f"tokenizer.{key}": str(value)
        for key, value in cfg.tokenizer.items()
        if key != "_component_" and isinstance(value, str) and Path(value).exists()
    }
    if isinstance(cfg.eval_only, str):
        found["eval_only"] = cfg.eval_only
    if cfg.train_from:
        found["train_from"] = cfg.train_from
    if replayed := replayed_run(cfg):
        found["replay_events"] = str(replayed / "logs")
    return found


def _need(
    count: int,
    arguments: Mapping[str, Any],
    strategy: Literal["PACK", "SPREAD"],
    paths: Mapping[str, str],
) -> Need:
    """Return the need of `count` processes with the same arguments for `Cluster.spawn`."""
    num_gpus = arguments.get("num_gpus", 0)
    resources = {"GPU": num_gpus} if num_gpus else {"CPU": arguments.get("cpu_threads", 1)}
    return Need(count, resources, strategy, paths)
