"""What every role is built from: the config's values as the typed arguments of the role classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torchtune import config

from grpo_components.cluster.cluster import engine_environment
from grpo_components.config.building import build_environment, has_slots_apart, split_learning_rate
from grpo_components.exchange.staleness import StalenessContract
from grpo_components.models.meshes import Sharding
from grpo_components.offline.partial_runs import stand_in_arguments
from grpo_components.replay.recorded_run import available_cpus, run_folder, stall_limit_s
from grpo_components.rewards.pool import reward_specs
from grpo_components.settings import TRUNCATION, Settings
from grpo_components.training.skipped_steps import skipped_folder


@dataclass(frozen=True)
class RoleArguments:
    """Keyword arguments for `Cluster.spawn`, by role."""

    replay_buffer: dict[str, Any]
    trainer: dict[str, Any]
    reference: dict[str, Any]
    reward_model: dict[str, Any]
    generator: dict[str, Any]


def role_arguments(
    cfg: Settings,
    *,
    contract: StalenessContract,
    objective: dict[str, Any],
    num_references: int,
    stop_tokens: Sequence[int],
    longest_prompt: int,
    rendezvous: str,
) -> RoleArguments:
    """Read a checked config into arguments.

    Args:
        cfg: checked by preflight.
        contract: which groups may still be trained.
        objective: the trainer's loss, aggregation and off_policy, already built.
        num_references: that will be started.
        stop_tokens: of the tokenizer.
        longest_prompt: of all data sets, in tokens.
        rendezvous: file through which the trainer ranks find each other.
    """
    num_reward_models = int(cfg.reward_model.path is not None)
    num_roles = cfg.num_generators + cfg.num_trainers + num_references + num_reward_models
    shared: dict[str, Any] = {
        "cpu_threads": max(1, available_cpus(cfg.replay_events) // num_roles),
        "device": cfg.device,
        "dtype": cfg.dtype,
    }
    policy = {
        **shared,
        "build_model": partial(config.instantiate, cfg.model),
        "build_checkpointer": partial(config.instantiate, cfg.checkpointer),
        "tokens_per_micro_batch": cfg.tokens_per_micro_batch,
        "packing": cfg.packing,
        "logprob_chunk_tokens": cfg.logprob_chunk_tokens,
    }

    def gpus(role: str) -> float:
        return getattr(cfg, f"gpus_per_{role}") if cfg.device == "cuda" else 0

    replay_buffer = {
        "capacity": (cfg.max_staleness + 1) * cfg.groups_per_step,
        "contract": contract,
        "stale_tokens": cfg.stale_tokens,
        "timeout_s": cfg.timeouts.batch_s,
    }
    optimizer, learning_rate = split_learning_rate(cfg.optimizer)
    trainer = {
        **policy,
        **objective,
        "num_ranks": cfg.num_trainers,
        "rendezvous": rendezvous,
        "sharding": Sharding(
            replicate=cfg.data_parallel_replicate_dim,
            tensor=cfg.tensor_parallel_dim,
            reduce_dtype=cfg.reduce_dtype,
            cpu_offload=cfg.fsdp_cpu_offload,
            offload_activations=cfg.enable_activation_offloading,
        ),
        "seed": cfg.seed,
        "build_optimizer": partial(config.instantiate, optimizer),
        "build_lr_scheduler": cfg.lr_scheduler
        and partial(config.instantiate, cfg.lr_scheduler, num_training_steps=cfg.num_steps),
        "learning_rate": learning_rate,
        "max_staleness": cfg.max_staleness,
        "mask_overlong": cfg.mask_overlong,
        "model_type": cfg.checkpointer.model_type,
        "base_model_path": cfg.base_model_path,
        "ppo_epochs": cfg.ppo_epochs,
        "updates_per_batch": cfg.updates_per_batch,
        "clip_grad_norm": cfg.clip_grad_norm,
        "enable_activation_checkpointing": cfg.enable_activation_checkpointing,
        "compile_model": cfg.compile,
        "log_peak_memory_stats": cfg.log_peak_memory_stats,
        "build_profiler": partial(config.instantiate, cfg.profiler)
        if cfg.profiler.enabled
        else None,
        "skipped_folder": str(skipped_folder(cfg.output_dir)),
        "collective_timeout_s": cfg.timeouts.collective_s,
        "logged_responses": cfg.log_token_logprobs * cfg.rollouts_logged_per_step * cfg.group_size,
        "num_gpus": gpus("trainer"),
    }
    reference = {
        **policy,
        "kl_estimator": cfg.reward_shaping.kl_estimator,
        "num_gpus": gpus("reference"),
    }
    reward_model = {**shared, **cfg.reward_model.model_dump(), "num_gpus": gpus("reward_model")}
    engine = cfg.generator
    generator = {
        **shared,
        "model_path": cfg.base_model_path,
        "build_tokenizer": partial(config.instantiate, cfg.tokenizer),
        "build_environment": partial(build_environment, cfg.environment),
        "slots_apart": has_slots_apart(cfg.environment),
        "rewards": reward_specs(cfg.rewards),
        "reward_workers": cfg.reward_workers,
        "reward_timeout_s": cfg.timeouts.reward_s,
        # Before the driver gives the generator up: then only this group is lost.
        "environment_timeout_s": cfg.timeouts.rollout_s / 2,
        "group_size": cfg.group_size,
        "rollouts_in_flight": cfg.rollouts_in_flight,
        "seed": cfg.seed,
        "log_token_texts": cfg.log_token_logprobs,
        "max_response_tokens": engine.max_response_tokens,
        "stop_token_ids": list(engine.stop_token_ids or stop_tokens),
        "truncation": {name: getattr(engine, name) for name in TRUNCATION},
        "max_model_len": engine.max_model_len or longest_prompt + engine.max_response_tokens,
        "max_num_seqs": engine.max_num_seqs,
        "gpu_memory_utilization": engine.gpu_memory_utilization,
        "enforce_eager": engine.enforce_eager,
        "recompute_kv_after_pull": cfg.recompute_kv_after_pull,
        "schedule_folder": str(Path(cfg.output_dir) / "logs"),
        "replayed_folder": cfg.replay_events and str(run_folder(cfg.replay_events) / "logs"),
        "replay_timeout_s": stall_limit_s(cfg.timeouts.rollout_s),
        "numbered_lives": True,
        "num_gpus": gpus("generator"),
        "min_living": cfg.num_generators if cfg.min_generators is None else cfg.min_generators,
        # A file of vLLM's would stay behind where a generator is killed: this folder is removed.
        "env": engine_environment(cfg.device, cfg.log_level, engine.kv_cache_gib)
        | {"TMPDIR": str(Path(rendezvous).parent)},
    }
    trainer, generator = stand_in_arguments(cfg, trainer, generator)
    return RoleArguments(replay_buffer, trainer, reference, reward_model, generator)
