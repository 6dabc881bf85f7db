"""Turns config values into the option records and keyword arguments of every role."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from torchtune import config

from grpo_components.config.components import (
    build_environment,
    environment_kind,
)
from grpo_components.config.data import sampled_ids
from grpo_components.config.model_trial import split_learning_rate
from grpo_components.config.replayed import available_cpus, replay_of
from grpo_components.exchange.staleness import StalenessContract
from grpo_components.models.hugging_face_policy import hugging_face
from grpo_components.models.meshes import Sharding
from grpo_components.objective.objective import TrainedObjective
from grpo_components.offline.partial_runs import TRAJECTORIES, start_model
from grpo_components.quiet import engine_environment
from grpo_components.rewards.pool import RewardPool, reward_specs
from grpo_components.rollout.generator_options import EngineOptions, EnvironmentOptions
from grpo_components.rollout.schedule import open_schedule
from grpo_components.settings import Settings, teachers_of
from grpo_components.training.trainer_options import TrainerOptions
from grpo_components.training.weight_sender import WeightSender

Record = TypeVar("Record")


def role_arguments(
    cfg: Settings,
    *,
    contract: StalenessContract,
    objective: TrainedObjective,
    num_references: int,
    tokenizer: Any,
    longest_prompt: int,
) -> dict[str, dict[str, Any]]:
    """Return keyword arguments for `Cluster.spawn` by the family of roles, for a checked config."""
    families = ("trainer", "reference", "teacher", "reward_model", "generator")
    places = {family: _place(cfg, num_references, family) for family in families}
    ids = sampled_ids(cfg, tokenizer)
    logged = cfg.log_token_logprobs * cfg.rollouts_logged_per_step * cfg.group_size
    trainer = {"path": str(Path(cfg.output_dir) / TRAJECTORIES), "logged_responses": logged}
    if cfg.trains:
        trainer = places["trainer"] | _trainer(cfg, contract, objective, ids, logged)
    living = cfg.num_generators if cfg.min_generators is None else cfg.min_generators
    generator = {"path": cfg.train_from}
    if not cfg.train_from:
        generator = places["generator"] | _generator(cfg, tokenizer, longest_prompt, ids)
    reference = _reference(cfg, ids)
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
        "generator": {**generator, "min_living": living},
    }


def _place(cfg: Settings, num_references: int, family: str) -> dict[str, Any]:
    """Return the number of GPUs and of torch threads of each process of a family."""
    num_reward_models = int(cfg.reward_model.path is not None)
    num_frozen = num_references + teachers_of(cfg) + num_reward_models
    share = max(1, available_cpus(cfg) // (cfg.num_generators + cfg.num_trainers + num_frozen))
    if cfg.ray.address is not None:  # as Ray does: the cores of this machine say nothing there
        share = 1
    gpus = getattr(cfg, f"gpus_per_{family}") if cfg.device == "cuda" else 0
    workers = cfg.generator.tensor_parallel_size if family == "generator" else 1
    threads = getattr(cfg.cpu_threads, family) or share
    return {"cpu_threads": threads, "num_gpus": gpus * workers}


def _taken(record: type[Record], cfg: Settings, **derived: Any) -> Record:
    """Build an option record from `derived`; fill its other fields from config keys by name."""
    names = {field.name for field in fields(cast(Any, record))} - derived.keys()
    return record(**{name: getattr(cfg, name) for name in names if hasattr(cfg, name)}, **derived)


def _checkpointer(cfg: Settings) -> Callable[[], Any] | None:
    """Return the function that builds the checkpointer; None if transformers reads the files."""
    if cfg.is_hugging_face or cfg.checkpointer is None:
        return None
    return partial(config.instantiate, cfg.checkpointer)


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
    steps, build_lr_scheduler = cfg.num_steps, None
    if cfg.lr_scheduler:
        build_lr_scheduler = partial(config.instantiate, cfg.lr_scheduler, num_training_steps=steps)
    profiler = partial(config.instantiate, cfg.profiler)
    return {
        "meets": True,
        "device": cfg.device,
        "seed": cfg.seed,
        "options": _taken(
            TrainerOptions,
            cfg,
            num_ranks=cfg.num_trainers,
            sharding=sharding,
            collective_timeout_s=cfg.timeouts.collective_s,
            open_sender=sender,
            build_model=partial(config.instantiate, cfg.model),
            build_checkpointer=_checkpointer(cfg),
            num_ids=ids,
            contract=contract,
            build_optimizer=partial(config.instantiate, optimizer),
            build_lr_scheduler=build_lr_scheduler,
            learning_rate=learning_rate,
            build_profiler=profiler if cfg.profiler.enabled else None,
            logged_responses=logged_responses,
        ),
        "objective": objective,
    }


def _reference(cfg: Settings, ids: int | None) -> dict[str, Any]:
    return {
        "device": cfg.device,
        "dtype": cfg.dtype,
        "build_model": partial(config.instantiate, cfg.model),
        "build_checkpointer": _checkpointer(cfg),
        "tokens_per_micro_batch": cfg.tokens_per_micro_batch,
        "logprob_chunk_tokens": cfg.logprob_chunk_tokens,
        "num_ids": ids,
        "kl_estimator": cfg.reward_shaping.kl_estimator,
    }


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
    return {
        "counts_restarts": True,
        "env": engine_environment(cfg.device, cfg.log_level),
        "build_tokenizer": partial(config.instantiate, cfg.tokenizer),
        "settings": sampler,
        "engine": _taken(
            EngineOptions,
            cfg,
            **start_model(cfg),
            num_ids=ids,
            weight_transfer=None if cfg.weights == "object_store" else cfg.weights,
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
