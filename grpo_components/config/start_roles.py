"""Starts a process for every role of a run, with the config values it takes; returns handles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from omegaconf import DictConfig
from torchtune import config

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
from grpo_components.config.components import build_environment, environment_kind
from grpo_components.config.data import sampled_ids
from grpo_components.config.model_trial import split_learning_rate
from grpo_components.config.replayed import available_cpus, replay_of
from grpo_components.exchange.ledger import Ledger
from grpo_components.exchange.staleness import StalenessContract
from grpo_components.models.hugging_face_policy import hugging_face
from grpo_components.models.meshes import Sharding
from grpo_components.objective.objective import Objective, TrainedObjective
from grpo_components.offline.partial_runs import TRAJECTORIES, roles_of, start_model
from grpo_components.quiet import engine_environment
from grpo_components.rewards.pool import RewardPool, reward_specs
from grpo_components.rollout.generator_options import EngineOptions, EnvironmentOptions
from grpo_components.rollout.schedule import open_schedule
from grpo_components.settings import Settings, processes_of
from grpo_components.training.trainer_options import TrainerOptions
from grpo_components.training.weight_sender import WeightSender

# Dotted paths: each role's module is imported in the role's own process only.
GENERATOR = "grpo_components.rollout.generator.Generator"
REFERENCE = "grpo_components.training.reference.Reference"
REWARD_MODEL = "grpo_components.training.reward_model.RewardModel"
REPLAY_BUFFER = "grpo_components.exchange.replay_buffer.ReplayBuffer"
TRAINER = "grpo_components.training.trainer.Trainer"
PARAMETER_SERVER = "grpo_components.exchange.parameter_server.VLLMParameterServer"

Record = TypeVar("Record")


def start_roles(
    cfg: Settings,
    cluster: Cluster,
    ledger: Ledger,
    contract: StalenessContract,
    objective: Objective,
    tokenizer: Any,
    longest_prompt: int,
) -> Roles:
    """Start a process for every role and return handles; `Cluster.ready` waits for them."""
    for doubt in objective.doubts:
        cluster.note(doubt)
    counts = processes_of(cfg, objective.trained.needs_reference)
    arguments = role_arguments(cfg, counts, contract, objective.trained, tokenizer, longest_prompt)
    spawn, timeouts = cluster.spawn, cfg.timeouts
    cluster.ray.reserve(needs_of(cfg, arguments, counts), timeouts.startup_s)

    def family(name: str, path: str) -> list[Any]:
        return [spawn(f"{name}_{n}", path, **arguments[name]) for n in range(counts[name])]

    trainer, generator = roles_of(cfg, TRAINER, GENERATOR)  # or their stand-ins
    server = spawn("parameter_server", PARAMETER_SERVER)
    buffer = spawn("replay_buffer", REPLAY_BUFFER, **arguments["replay_buffer"])
    rank = partial(spawn, **arguments["trainer"])
    trainers = [rank(f"trainer_{n}", trainer, rank=n) for n in range(cfg.num_trainers)]
    references, teachers = family("reference", REFERENCE), family("teacher", REFERENCE)
    scorer = counts["reward_model"] and spawn(
        "reward_model", REWARD_MODEL, **arguments["reward_model"]
    )
    turns = Colocation(ledger) if cfg.colocate else None
    sampler = partial(spawn, pause=turns and turns.pause, **arguments["generator"])
    samplers = [
        sampler(f"generator_{n}", generator, number=n, beside=hosts_of(cfg, n))
        for n in range(cfg.num_generators)
    ]
    waits, draws = cfg.stale_groups == "wait", bool(cfg.curriculum)
    generators = [GeneratorHandle(role, ledger, timeouts, draws) for role in samplers]
    turn = turns and partial(turns.trainers_turn, generators)
    frozen = partial(ReferencesHandle, timeouts=timeouts)
    ranks = TrainersHandle(trainers, ledger, timeouts, turn)
    return Roles(
        generators=generators,
        buffer=ReplayBufferHandle(buffer, ledger, timeouts, wait_for_stale=waits),
        trainers=ranks,
        server=ParameterServerHandle(server, ranks, timeouts, deltas=cfg.push == "delta"),
        references=frozen(references) if references else None,
        teachers=frozen(teachers, keep_kl=False) if teachers else None,
        reward_model=RewardModelHandle(scorer, timeouts) if scorer else None,
        transfer=None if cfg.weights == "object_store" else WeightTransfer(trainers[0], timeouts),
    )


# ---- what the roles get -------------------------------------------------------------------------


def role_arguments(
    cfg: Settings,
    counts: Mapping[str, int],
    contract: StalenessContract,
    objective: TrainedObjective,
    tokenizer: Any,
    longest_prompt: int,
) -> dict[str, dict[str, Any]]:
    """Return the keyword arguments of `Cluster.spawn` for each kind of role."""
    share = max(1, available_cpus(cfg) // sum(counts.values()))
    if cfg.ray.address is not None:  # Ray's default, as other nodes may have other cores
        share = 1
    workers = {"generator": cfg.generator.tensor_parallel_size}
    places: dict[str, dict[str, Any]] = {}
    for family in counts:
        gpus = getattr(cfg, f"gpus_per_{family}") if cfg.device == "cuda" else 0
        threads = getattr(cfg.cpu_threads, family) or share
        places[family] = {"cpu_threads": threads, "num_gpus": gpus * workers.get(family, 1)}
    ids = sampled_ids(cfg, tokenizer)
    logged = cfg.log_token_logprobs * cfg.rollouts_logged_per_step * cfg.group_size
    trainer = {"path": str(Path(cfg.output_dir) / TRAJECTORIES), "logged_responses": logged}
    if cfg.trains:
        trainer = places["trainer"] | _trainer(cfg, contract, objective, ids, logged)
    generator = {"path": cfg.train_from}
    if not cfg.train_from:
        generator = places["generator"] | _generator(cfg, tokenizer, longest_prompt, ids)
    reference = {
        "device": cfg.device,
        "dtype": cfg.dtype,
        "build_model": partial(config.instantiate, cfg.model),
        "build_checkpointer": _component(None if cfg.is_hugging_face else cfg.checkpointer),
        "tokens_per_micro_batch": cfg.tokens_per_micro_batch,
        "logprob_chunk_tokens": cfg.logprob_chunk_tokens,
        "num_ids": ids,
        "kl_estimator": cfg.reward_shaping.kl_estimator,
    }
    teacher = {"field": "teacher_logprobs", "build_checkpointer": None, "kl_estimator": "k1"}
    teacher["build_model"] = partial(hugging_face, cfg.teacher.path) if cfg.teacher else None
    scorer = {"device": cfg.device, "dtype": cfg.dtype, "settings": cfg.reward_model}
    return {
        "replay_buffer": {
            "contract": contract,
            "stale_tokens": cfg.stale_tokens,
            "timeout_s": cfg.timeouts.batch_s,
        },
        "trainer": trainer,
        "reference": places["reference"] | reference,
        "teacher": places["teacher"] | reference | teacher,
        "reward_model": places["reward_model"] | scorer,
        "generator": {**generator, "min_living": cfg.min_generators or cfg.num_generators},
    }


def _component(node: DictConfig | None, **given: Any) -> Any:
    """Return a function that builds a component later, in a role's process; None without one."""
    return partial(config.instantiate, node, **given) if node else None


def _taken(record: type[Record], cfg: Settings, **derived: Any) -> Record:
    """Build an options record: each field from `derived`, else from the config key of that name."""
    names = {field.name for field in fields(cast(Any, record))} - derived.keys()
    return record(**{name: getattr(cfg, name) for name in names if hasattr(cfg, name)}, **derived)


def _trainer(
    cfg: Settings,
    contract: StalenessContract,
    objective: TrainedObjective,
    ids: int | None,
    logged_responses: int,
) -> dict[str, Any]:
    sharding = Sharding(
        replicate=cfg.data_parallel_replicate_dim,
        tensor=cfg.tensor_parallel_dim,
        reduce_dtype=cfg.reduce_dtype,
        cpu_offload=cfg.fsdp_cpu_offload,
        offload_activations=cfg.enable_activation_offloading,
    )
    sender = None
    if cfg.weights != "object_store":
        sender = partial(WeightSender, cfg.device, workers=cfg.generator.tensor_parallel_size)
    optimizer, learning_rate = split_learning_rate(cfg.optimizer)
    options = _taken(
        TrainerOptions,
        cfg,
        num_ranks=cfg.num_trainers,
        sharding=sharding,
        collective_timeout_s=cfg.timeouts.collective_s,
        open_sender=sender,
        build_model=_component(cfg.model),
        build_checkpointer=_component(None if cfg.is_hugging_face else cfg.checkpointer),
        num_ids=ids,
        contract=contract,
        build_optimizer=_component(optimizer),
        build_lr_scheduler=_component(cfg.lr_scheduler, num_training_steps=cfg.num_steps),
        learning_rate=learning_rate,
        build_profiler=_component(cfg.profiler if cfg.profiler.enabled else None),
        logged_responses=logged_responses,
    )
    given = {"device": cfg.device, "seed": cfg.seed, "options": options, "objective": objective}
    return {"meets": True, "restarts_alone": False, **given}


def _generator(
    cfg: Settings, tokenizer: Any, longest_prompt: int, ids: int | None
) -> dict[str, Any]:
    section = cfg.generator
    sampler = section.model_copy(
        update={
            "max_model_len": section.max_model_len or longest_prompt + section.max_response_tokens,
            "stop_token_ids": section.stop_token_ids or list(tokenizer.stop_tokens),
        }
    )
    replay, logs = replay_of(cfg), str(Path(cfg.output_dir) / "logs")
    transfer = None if cfg.weights == "object_store" else cfg.weights
    return {
        "counts_restarts": True,
        "env": engine_environment(cfg.device, cfg.log_level),
        "build_tokenizer": _component(cfg.tokenizer),
        "settings": sampler,
        "engine": _taken(
            EngineOptions, cfg, **start_model(cfg), num_ids=ids, weight_transfer=transfer
        ),
        "environment": EnvironmentOptions(
            build_environment=partial(build_environment, cfg.environment),
            # Shorter than the driver's time-out for a generator: a hang costs only this group.
            timeout_s=cfg.timeouts.rollout_s / 2,
            kind=environment_kind(cfg.environment),
        ),
        "open_rewards": partial(
            RewardPool,
            reward_specs(cfg.rewards),
            num_workers=cfg.reward_workers,
            timeout_s=cfg.timeouts.reward_s,
        ),
        "group_size": cfg.group_size,
        "seed": cfg.seed,
        "rollouts_in_flight": cfg.rollouts_in_flight,
        "log_token_texts": cfg.log_token_logprobs,
        "open_schedule": partial(open_schedule, logs, replay and replay.read_schedule),
    }


# ---- what each kind of role needs of a joined cluster -------------------------------------------


def needs_of(
    cfg: Settings, arguments: Mapping[str, dict[str, Any]], counts: Mapping[str, int]
) -> dict[str, Need]:
    """Return the cluster resources of each kind of role that needs resources of its own."""
    needs: dict[str, Need] = {}
    for family in (family for family, count in counts.items() if count):
        gpus = arguments[family].get("num_gpus", 0)
        resources = {"GPU": gpus} if gpus else {"CPU": arguments[family].get("cpu_threads", 1)}
        strategy = "SPREAD" if family == "generator" else "PACK"
        needs[family] = Need(counts[family], resources, strategy)
    if hosts := hosts_of(cfg, 0):
        del needs["generator"]
        needs["trainer"] = replace(needs["trainer"], together=len(hosts), guests="generator")
    else:
        needs["trainer"] = replace(needs["trainer"], together=cfg.tensor_parallel_dim)
    return needs


def hosts_of(cfg: Settings, generator: int) -> list[str]:
    """Return the names of the trainers whose GPUs a generator shares; empty if it has its own."""
    if not (cfg.colocate and cfg.device == "cuda"):
        return []
    workers = cfg.generator.tensor_parallel_size
    return [f"trainer_{generator * workers + worker}" for worker in range(workers)]
