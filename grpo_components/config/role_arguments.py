"""Turns config values into the option records and keyword arguments of every role."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torchtune import config

from grpo_components.cluster.cluster import threads_of
from grpo_components.config.components import build_environment, has_slots_apart, runs_agents
from grpo_components.config.data import sampled_ids
from grpo_components.config.model_trial import split_learning_rate
from grpo_components.exchange.staleness import StalenessContract
from grpo_components.models.hugging_face_policy import hugging_face
from grpo_components.models.lora import lora_options
from grpo_components.models.meshes import Sharding
from grpo_components.offline.partial_runs import stand_in_arguments
from grpo_components.replay.recorded_run import replayed_run, stall_limit_s
from grpo_components.rewards.pool import reward_specs
from grpo_components.rollout.engine_environment import engine_environment
from grpo_components.rollout.generator_options import (
    EngineOptions,
    EnvironmentOptions,
    ReplayOptions,
    RewardOptions,
    SamplingOptions,
)
from grpo_components.rollout.open_sender import open_sender
from grpo_components.settings import TRUNCATION, Settings
from grpo_components.training.trainer_options import (
    BatchOptions,
    DiagnosticsOptions,
    ModelOptions,
    ObjectiveOptions,
    OptimizerOptions,
    RankOptions,
)


@dataclass(frozen=True)
class RoleArguments:
    """Keyword arguments for `Cluster.spawn`, which starts the processes, by role."""

    replay_buffer: dict[str, Any]
    trainer: dict[str, Any]
    reference: dict[str, Any]
    teacher: dict[str, Any]
    reward_model: dict[str, Any]
    generator: dict[str, Any]


def role_arguments(
    cfg: Settings,
    *,
    contract: StalenessContract,
    objective: ObjectiveOptions,
    num_references: int,
    tokenizer: Any,
    longest_prompt: int,
) -> RoleArguments:
    """Return the arguments of every role for a checked config."""
    threads = partial(threads_of, cfg, num_references=num_references)
    stop_tokens, ids = tokenizer.stop_tokens, sampled_ids(cfg, tokenizer)
    trainer, generator = stand_in_arguments(
        cfg,
        _trainer(cfg, threads("trainer"), contract, objective, ids),
        _generator(cfg, threads("generator"), stop_tokens, longest_prompt, ids),
    )
    return RoleArguments(
        replay_buffer=_replay_buffer(cfg, contract),
        trainer=trainer,
        reference=_reference(cfg, threads("reference"), ids),
        teacher=_teacher(cfg, cfg.teacher.path, threads("teacher"), ids) if cfg.teacher else {},
        reward_model=_reward_model(cfg, threads("reward_model")),
        generator=generator,
    )


def _checkpointer(cfg: Settings) -> Callable[[], Any] | None:
    """Return the function that builds the checkpointer; None if transformers reads the files."""
    if cfg.is_hugging_face or cfg.checkpointer is None:
        return None
    return partial(config.instantiate, cfg.checkpointer)


def _gpus(cfg: Settings, per_role: float) -> float:
    return per_role if cfg.device == "cuda" else 0


def _replay_buffer(cfg: Settings, contract: StalenessContract) -> dict[str, Any]:
    return {
        "contract": contract,
        "stale_tokens": cfg.stale_tokens,
        "timeout_s": cfg.timeouts.batch_s,
    }


def _trainer(
    cfg: Settings,
    cpu_threads: int,
    contract: StalenessContract,
    objective: ObjectiveOptions,
    ids: int | None,
) -> dict[str, Any]:
    return {
        "cpu_threads": cpu_threads,
        "num_gpus": _gpus(cfg, cfg.gpus_per_trainer),
        "meets": True,
        "device": cfg.device,
        "seed": cfg.seed,
        "ranks": _rank_options(cfg),
        "model": ModelOptions(
            build_model=partial(config.instantiate, cfg.model),
            build_checkpointer=_checkpointer(cfg),
            base_model_path=cfg.base_model_path,
            model_type=cfg.model_type,
            dtype=cfg.dtype,
            enable_activation_checkpointing=cfg.enable_activation_checkpointing,
            compile_model=cfg.compile,
            logprob_chunk_tokens=cfg.logprob_chunk_tokens,
            num_ids=ids,
            lora=lora_options(cfg.lora),
        ),
        "batch": BatchOptions(
            ppo_epochs=cfg.ppo_epochs,
            updates_per_batch=cfg.updates_per_batch,
            tokens_per_micro_batch=cfg.tokens_per_micro_batch,
            contract=contract,
            mask_overlong=cfg.mask_overlong,
        ),
        "optimizer": _optimizer_options(cfg),
        "objective": objective,
        "diagnostics": _diagnostics_options(cfg),
    }


def _rank_options(cfg: Settings) -> RankOptions:
    sharding = Sharding(
        replicate=cfg.data_parallel_replicate_dim,
        tensor=cfg.tensor_parallel_dim,
        reduce_dtype=cfg.reduce_dtype,
        cpu_offload=cfg.fsdp_cpu_offload,
        offload_activations=cfg.enable_activation_offloading,
    )
    return RankOptions(
        num_ranks=cfg.num_trainers,
        sharding=sharding,
        collective_timeout_s=cfg.timeouts.collective_s,
        takes_turns=cfg.colocate,
        open_sender=_sender(cfg),
    )


def _sender(cfg: Settings) -> Callable[..., Any] | None:
    if cfg.weights == "object_store":
        return None
    workers, timeout_s = cfg.generator.tensor_parallel_size, cfg.timeouts.weights_s
    return partial(open_sender, cfg.device, workers=workers, timeout_s=timeout_s)


def _optimizer_options(cfg: Settings) -> OptimizerOptions:
    optimizer, learning_rate = split_learning_rate(cfg.optimizer)
    steps, build_lr_scheduler = cfg.num_steps, None
    if cfg.lr_scheduler:
        build_lr_scheduler = partial(config.instantiate, cfg.lr_scheduler, num_training_steps=steps)
    return OptimizerOptions(
        build_optimizer=partial(config.instantiate, optimizer),
        build_lr_scheduler=build_lr_scheduler,
        learning_rate=learning_rate,
        clip_grad_norm=cfg.clip_grad_norm,
    )


def _diagnostics_options(cfg: Settings) -> DiagnosticsOptions:
    profiles = cfg.profiler.enabled
    return DiagnosticsOptions(
        log_peak_memory_stats=cfg.log_peak_memory_stats,
        build_profiler=partial(config.instantiate, cfg.profiler) if profiles else None,
        logged_responses=cfg.log_token_logprobs * cfg.rollouts_logged_per_step * cfg.group_size,
    )


def _reference(cfg: Settings, cpu_threads: int, ids: int | None) -> dict[str, Any]:
    return {
        "cpu_threads": cpu_threads,
        "num_gpus": _gpus(cfg, cfg.gpus_per_reference),
        "device": cfg.device,
        "dtype": cfg.dtype,
        "build_model": partial(config.instantiate, cfg.model),
        "build_checkpointer": _checkpointer(cfg),
        "tokens_per_micro_batch": cfg.tokens_per_micro_batch,
        "logprob_chunk_tokens": cfg.logprob_chunk_tokens,
        "num_ids": ids,
        "kl_estimator": cfg.reward_shaping.kl_estimator,
    }


def _teacher(cfg: Settings, path: str, cpu_threads: int, ids: int | None) -> dict[str, Any]:
    """Return the arguments of a reference that has the teacher's weights."""
    return {
        **_reference(cfg, cpu_threads, ids),
        "num_gpus": _gpus(cfg, cfg.gpus_per_teacher),
        "field": "teacher_logprobs",
        "build_model": partial(hugging_face, path),
        "build_checkpointer": None,
        "kl_estimator": "k1",
    }


def _reward_model(cfg: Settings, cpu_threads: int) -> dict[str, Any]:
    return {
        "cpu_threads": cpu_threads,
        "num_gpus": _gpus(cfg, cfg.gpus_per_reward_model),
        "device": cfg.device,
        "dtype": cfg.dtype,
        "path": cfg.reward_model.path,
        "weight": cfg.reward_model.weight,
        "chat_template": cfg.reward_model.chat_template,
        "tokens_per_micro_batch": cfg.reward_model.tokens_per_micro_batch,
    }


def _generator(
    cfg: Settings,
    cpu_threads: int,
    stop_tokens: Sequence[int],
    longest_prompt: int,
    ids: int | None,
) -> dict[str, Any]:
    options = cfg.generator
    return {
        "cpu_threads": cpu_threads,
        "num_gpus": _gpus(cfg, cfg.gpus_per_generator * options.tensor_parallel_size),
        "counts_restarts": True,
        "min_living": cfg.num_generators if cfg.min_generators is None else cfg.min_generators,
        "env": engine_environment(cfg.device, cfg.log_level),
        "build_tokenizer": partial(config.instantiate, cfg.tokenizer),
        "engine": _engine_options(cfg, longest_prompt, ids),
        "sampling": SamplingOptions(
            group_size=cfg.group_size,
            seed=cfg.seed,
            max_response_tokens=options.max_response_tokens,
            stop_token_ids=list(options.stop_token_ids or stop_tokens),
            truncation={name: getattr(options, name) for name in TRUNCATION},
        ),
        "environment": EnvironmentOptions(
            build_environment=partial(build_environment, cfg.environment),
            # Shorter than the driver's time-out for a generator: a hang costs only this group.
            timeout_s=cfg.timeouts.rollout_s / 2,
            slots_apart=has_slots_apart(cfg.environment),
            runs_agents=runs_agents(cfg.environment),
        ),
        "rewards": RewardOptions(
            rewards=reward_specs(cfg.rewards),
            num_workers=cfg.reward_workers,
            timeout_s=cfg.timeouts.reward_s,
        ),
        "rollouts_in_flight": cfg.rollouts_in_flight,
        "log_token_texts": cfg.log_token_logprobs,
        "replay": _replay_options(cfg),
    }


def _engine_options(cfg: Settings, longest_prompt: int, ids: int | None) -> EngineOptions:
    options = cfg.generator
    return EngineOptions(
        model_path=cfg.base_model_path,
        device=cfg.device,
        dtype=cfg.dtype,
        max_model_len=options.max_model_len or longest_prompt + options.max_response_tokens,
        max_num_seqs=options.max_num_seqs,
        gpu_memory_utilization=options.gpu_memory_utilization,
        kv_cache_gib=options.kv_cache_gib,
        enforce_eager=bool(options.enforce_eager),  # preflight replaced null
        recompute_kv_after_pull=cfg.recompute_kv_after_pull,
        num_ids=ids,
        tensor_parallel_size=options.tensor_parallel_size,
        takes_turns=cfg.colocate,
        weight_transfer=None if cfg.weights == "object_store" else cfg.weights,
        lora=lora_options(cfg.lora),
    )


def _replay_options(cfg: Settings) -> ReplayOptions:
    replayed = replayed_run(cfg)
    return ReplayOptions(
        schedule_folder=str(Path(cfg.output_dir) / "logs"),
        replayed_folder=str(replayed / "logs") if replayed else None,
        timeout_s=stall_limit_s(cfg.timeouts.rollout_s),
    )
