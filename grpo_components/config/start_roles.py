"""Starts a process for every role of a run, and returns their handles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from grpo_components.cluster.cluster import Cluster
from grpo_components.cluster.colocation import Colocation
from grpo_components.cluster.handles import (
    GeneratorHandle,
    ParameterServerHandle,
    ReferencesHandle,
    ReplayBufferHandle,
    RewardModelHandle,
    Roles,
    TrainersHandle,
)
from grpo_components.cluster.ray_cluster import Need
from grpo_components.cluster.weight_transfer import WeightTransfer
from grpo_components.config.role_arguments import role_arguments
from grpo_components.exchange.ledger import Ledger
from grpo_components.exchange.staleness import StalenessContract
from grpo_components.objective.objective import Objective
from grpo_components.offline.partial_runs import roles_of
from grpo_components.settings import Settings, teachers_of

# Dotted paths: each role's module is imported in the role's own process only.
GENERATOR = "grpo_components.rollout.generator.Generator"
REFERENCE = "grpo_components.training.reference.Reference"
REWARD_MODEL = "grpo_components.training.reward_model.RewardModel"
REPLAY_BUFFER = "grpo_components.exchange.replay_buffer.ReplayBuffer"
TRAINER = "grpo_components.training.trainer.Trainer"
PARAMETER_SERVER = "grpo_components.exchange.parameter_server.VLLMParameterServer"


def start_roles(
    cfg: Settings,
    cluster: Cluster,
    ledger: Ledger,
    contract: StalenessContract,
    objective: Objective,
    tokenizer: Any,
    longest_prompt: int,
) -> Roles:
    """Start all processes without waiting; `Cluster.ready` waits for them."""
    cluster.show(objective.doubts)
    num_references = cfg.num_references if objective.trained.needs_reference else 0
    arguments = role_arguments(
        cfg,
        contract=contract,
        objective=objective.trained,
        num_references=num_references,
        tokenizer=tokenizer,
        longest_prompt=longest_prompt,
    )
    spawn, timeouts, weights_s = cluster.spawn, cfg.timeouts, cfg.timeouts.weights_s
    cluster.reserve(needs_of(cfg, arguments, num_references), timeouts.startup_s)
    trainer, generator = roles_of(cfg, TRAINER, GENERATOR)  # or their stand-ins
    server = spawn("parameter_server", PARAMETER_SERVER)
    buffer = spawn("replay_buffer", REPLAY_BUFFER, **arguments["replay_buffer"])
    rank = partial(spawn, restarts_alone=False, **arguments["trainer"])
    trainers = [rank(f"trainer_{n}", trainer, rank=n) for n in range(cfg.num_trainers)]
    frozen = partial(_frozen, cluster, timeouts.rollout_s)
    references = frozen("reference", num_references, arguments["reference"])
    teachers = frozen("teacher", teachers_of(cfg), arguments["teacher"], keep_kl=False)
    scorer = cfg.reward_model.path and spawn(
        "reward_model", REWARD_MODEL, **arguments["reward_model"]
    )
    turns = Colocation(ledger) if cfg.colocate else None
    sampler = partial(spawn, pause=turns and turns.pause, **arguments["generator"])
    samplers = [
        sampler(f"generator_{n}", generator, number=n, beside=hosts_of(cfg, n))
        for n in range(cfg.num_generators)
    ]
    waits, counts = cfg.stale_groups == "wait", bool(cfg.curriculum)
    limits, batch_limits = (timeouts.rollout_s, weights_s), (timeouts.batch_s, weights_s)
    generators = [GeneratorHandle(role, ledger, *limits, counts) for role in samplers]
    turn = turns and partial(turns.trainers_turn, generators)
    return Roles(
        generators=generators,
        buffer=ReplayBufferHandle(buffer, ledger, *batch_limits, wait_for_stale=waits),
        trainers=TrainersHandle(trainers, ledger, timeouts.train_step_s, weights_s, turn),
        server=ParameterServerHandle(server, weights_s),
        references=references,
        teachers=teachers,
        reward_model=RewardModelHandle(scorer, timeouts.rollout_s) if scorer else None,
        transfer=None if cfg.weights == "object_store" else WeightTransfer(trainers[0], weights_s),
    )


def _frozen(
    cluster: Cluster,
    timeout_s: float,
    family: str,
    count: int,
    arguments: dict[str, Any],
    keep_kl: bool = True,
) -> ReferencesHandle | None:
    """Start the references or the teachers of a run; None if there are none."""
    roles = [cluster.spawn(f"{family}_{n}", REFERENCE, **arguments) for n in range(count)]
    return ReferencesHandle(roles, timeout_s, keep_kl=keep_kl) if roles else None


# ---- what each family of roles needs of a joined cluster -----------------------------------------


def needs_of(
    cfg: Settings, arguments: Mapping[str, dict[str, Any]], num_references: int
) -> dict[str, Need]:
    """Return the resources that each family of roles needs; other roles run beside the driver."""
    scorers, teachers = int(bool(cfg.reward_model.path)), teachers_of(cfg)
    counts = {"trainer": cfg.num_trainers, "reference": num_references, "teacher": teachers}
    counts |= {"reward_model": scorers, "generator": cfg.num_generators}
    needs = {family: _need(family, counts[family], arguments[family]) for family in counts}
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


def _need(family: str, count: int, arguments: Mapping[str, Any]) -> Need:
    """Return the resources that `count` processes with the same `Cluster.spawn` arguments need."""
    num_gpus = arguments.get("num_gpus", 0)
    resources = {"GPU": num_gpus} if num_gpus else {"CPU": arguments.get("cpu_threads", 1)}
    return Need(count, resources, "SPREAD" if family == "generator" else "PACK")
