"""Checks the keys of a config against each other, without reading files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from omegaconf import OmegaConf

from grpo_components.errors import fail, shown
from grpo_components.evaluation.metrics import check_keep_best
from grpo_components.exchange.group_reuse import reused_per_step
from grpo_components.exchange.staleness import StalenessContract
from grpo_components.models.lora import fused_targets, lora_options
from grpo_components.models.tensor_parallel import FAMILIES
from grpo_components.objective.schedules import as_schedule
from grpo_components.settings import TRUNCATION, Settings, biasing, teachers_of

MAX_GENERATOR_KL = {"fp32": 1e-4, "bf16": 0.05}
"""Default upper bound of the KL (estimator k3) between trainer and generator, by `dtype`.

In nats per token, over responses sampled entirely by the policy version that trains on them;
docs/training.md has the reasons."""
_SCHEDULED = ("loss.clip_low", "loss.clip_high", "loss.kl_coeff", "reward_shaping.kl_coeff")
_SCHEDULED += ("advantages.kl_coeff", "optimizer.lr", "generator.temperature")


def check_together(settings: Settings) -> None:
    """Refuse values that contradict each other."""
    _check_schedules(settings)
    _check_asynchrony(settings)
    _check_colocated(settings)
    _check_objective(settings)
    _check_generation(settings)
    _check_lengths(settings)
    _check_ranks(settings)
    _check_memory_savings(settings)
    _check_optimizer(settings)
    _check_lora(settings)
    check_transfer(settings)
    check_keep_best(settings)
    _check_curriculum(settings)
    _check_reuse(settings)
    _check_rewards(settings)
    if settings.log_token_logprobs and settings.rollouts_logged_per_step == 0:
        _refuse(settings, "log_token_logprobs", "and rollouts_logged_per_step is 0", "false")


def kl_sections(settings: Settings) -> dict[str, Mapping[Any, Any]]:
    """Return the sections that may have a `kl_coeff`, by key."""
    shaping = settings.reward_shaping.model_dump()
    return {"loss": settings.loss, "reward_shaping": shaping, "advantages": settings.advantages}


def needs_reference(section: Mapping[Any, Any]) -> bool:
    """Whether a section needs the reference: its `kl_coeff` (number or schedule) ever exceeds 0."""
    return as_schedule("kl_coeff", section.get("kl_coeff", 0)).highest > 0


def default_bound(settings: Settings) -> float | None:
    """Return the default of `max_generator_kl`."""
    drops = settings.lora is not None and settings.lora.dropout > 0
    return None if drops or biasing(settings.generator) else MAX_GENERATOR_KL[settings.dtype]


def _value(settings: Settings, key: str) -> Any:
    section, _, name = key.rpartition(".")
    holder: Any = getattr(settings, section) if section else settings
    return holder.get(name) if OmegaConf.is_dict(holder) else getattr(holder, name)


def _refuse(settings: Settings, key: str, why: str, allowed: str) -> None:
    fail(key, f"{shown(_value(settings, key))} given, {why}", allowed)


def _check_schedules(settings: Settings) -> None:
    for key in _SCHEDULED:
        if (value := _value(settings, key)) is not None:
            as_schedule(key, value)


def _check_asynchrony(settings: Settings) -> None:
    most = StalenessContract(settings.max_staleness, settings.groups_per_step).max_push_interval
    if settings.push_every_n_steps > most:
        why = "which would deadlock: rollouts wait for a push, and it for them"
        _refuse(settings, "push_every_n_steps", why, f"at most max_staleness + 1 = {most}")
    if (settings.min_generators or 1) > settings.num_generators:
        why = f"and num_generators is {settings.num_generators}"
        _refuse(settings, "min_generators", why, "at most num_generators, or null for all of them")


def _check_colocated(settings: Settings) -> None:
    if not settings.colocate:
        return
    for key in ("eval_only", "rollout_only", "train_from"):
        if value := getattr(settings, key):
            _refuse(settings, "colocate", f"and {key} is {shown(value)}: no turns to take", "false")
    workers, share = settings.generator.tensor_parallel_size, settings.gpus_per_trainer
    required = {"max_staleness": 0, "push_every_n_steps": 1, "pull_every_m_rollouts": 1}
    required["num_trainers"] = settings.num_generators * workers
    if settings.device == "cuda":
        required["gpus_per_generator"] = 1
    for key, value in required.items():
        if getattr(settings, key) != value:
            why = "and with colocate: true, generators take turns with the trainers on their GPUs"
            _refuse(settings, key, why, f"{value} (or colocate: false)")
    if settings.device == "cuda" and share < 1 and workers > 1:
        _refuse(settings, "gpus_per_trainer", "and vLLM's workers need whole GPUs", "1")
    if settings.device == "cuda" and settings.generator.kv_cache_gib is None:
        why = "and what vLLM finds free beside a trainer that starts is chance"
        _refuse(settings, "generator.kv_cache_gib", why, "a number, with colocate: true")


def _check_objective(settings: Settings) -> None:
    for key, section in kl_sections(settings).items():
        has_reference = settings.num_references > 0 or settings.lora is not None
        if needs_reference(section) and not has_reference:
            why = f"and {key}.kl_coeff is {shown(section['kl_coeff'])}"
            _refuse(settings, "num_references", why, f"at least 1, or {key}.kl_coeff: 0")
    if OmegaConf.is_dict(settings.optimizer.get("lr")) and settings.lr_scheduler:
        fail("lr_scheduler", "given beside a schedule for optimizer.lr", "null, or a number there")
    correction = settings.off_policy["_component_"]
    weighs = correction.rpartition(".")[2] in ("TokenTIS", "SequenceTIS", "MaskedIS")
    if weighs and settings.loss.get("_component_", "").endswith(".DecoupledPPOLoss"):
        problem = f"{correction} given, and DecoupledPPOLoss has such weights already"
        fail("off_policy", problem, "NoCorrection, GeometricMask or OffPolicySequenceMask")


def _check_generation(settings: Settings) -> None:
    generator = settings.generator
    schedule = as_schedule("generator.temperature", generator.temperature)
    if schedule.warmup_steps and schedule(0) < 0.01:
        problem = f"{schedule.warmup_steps} given: the first step would have {schedule(0):.3g}, "
        problem += "and vLLM samples at 0.01 to 2"
        fail("generator.temperature.warmup_steps", problem, f"at most {int(schedule.start / 0.01)}")
    for name in biasing(generator) if not generator.allow_biased_sampling else ():
        why = "by which ratios are wrong: the trainer computes another distribution"
        allowed = f"{TRUNCATION[name]:g}, or generator.allow_biased_sampling: true"
        _refuse(settings, f"generator.{name}", why, allowed)


def _check_lengths(settings: Settings) -> None:
    response = settings.generator.max_response_tokens
    for key in ("environment.max_turns", "reward_shaping.overlong_tokens"):
        if (_value(settings, key) or 0) > response:
            why = f"and a response has up to {response} tokens"
            _refuse(settings, key, why, f"at most generator.max_response_tokens = {response}")
    prompt = settings.dataset.get("max_prompt_tokens") or 1
    for key in ("tokens_per_micro_batch", "generator.max_model_len"):
        limit = _value(settings, key)
        if limit is not None and limit < prompt + response:
            why = f"less than a prompt ({prompt}) and the longest response ({response})"
            _refuse(settings, key, why, f"at least {prompt + response}")


def _check_ranks(settings: Settings) -> None:
    ranks, tensor = settings.num_trainers, settings.tensor_parallel_dim
    model_type = settings.model_type
    if tensor > 1 and model_type is not None and model_type not in FAMILIES:
        why = f"and there is no tensor-parallel plan for {model_type}"
        _refuse(settings, "tensor_parallel_dim", why, f"1, or one of {', '.join(FAMILIES)}")
    if ranks % tensor:
        why, allowed = f"and num_trainers is {ranks}", "a divisor of num_trainers"
        _refuse(settings, "tensor_parallel_dim", why, allowed)
    parts = ranks // tensor
    if parts % settings.data_parallel_replicate_dim:
        why = f"and num_trainers / tensor_parallel_dim is {parts}"
        _refuse(settings, "data_parallel_replicate_dim", why, f"a divisor of {parts}")
    samples = settings.groups_per_step * settings.group_size
    if parts * settings.updates_per_batch > samples:
        allowed = f"num_trainers / tensor_parallel_dim x updates_per_batch at most {samples}"
        _refuse(settings, "num_trainers", f"and a step has {samples} samples", allowed)
    if settings.compile and tensor > 1:
        why = "and torch.compile fails on layers that are split over ranks"
        _refuse(settings, "compile", why, "false, or tensor_parallel_dim: 1")


def _check_memory_savings(settings: Settings) -> None:
    if settings.device == "cpu":
        least = {"dtype": "fp32", "reduce_dtype": "fp32", "enable_activation_offloading": False}
        for key, value in {**least, "fsdp_cpu_offload": False}.items():
            if getattr(settings, key) != value:
                allowed = f"{shown(value)}, or device: cuda"
                _refuse(settings, key, "which saves nothing with device: cpu", allowed)
    if settings.enable_activation_offloading and not settings.enable_activation_checkpointing:
        why = "and without checkpointing, every intermediate value would be copied"
        allowed = "false, or enable_activation_checkpointing: true"
        _refuse(settings, "enable_activation_offloading", why, allowed)


def _check_optimizer(settings: Settings) -> None:
    path = settings.optimizer["_component_"]
    if path.endswith(".CPUOffloadOptimizer"):
        problem = f"{path} given, which takes gradients away before they are clipped and checked"
        fail("optimizer", problem, "an optimizer on CUDA with fsdp_cpu_offload: true")
    if path.startswith("torchao.") and settings.optimizer.get("eps") is None:
        problem = f"{path} given without eps: 8 bits round small second moments to 0, and with the "
        problem += "default of 1e-8 such parameters then move many times too far"
        fail("optimizer", problem, "optimizer.eps not small against your gradients (1e-5, say)")


def _check_lora(settings: Settings) -> None:
    lora = lora_options(settings.lora)
    if lora is None:
        return
    model_type = settings.model_type or ""
    if fused := fused_targets(model_type, lora):
        problem = f"{', '.join(fused)} given, which {model_type} has in a fused layer"
        fail("lora.target_modules", problem, "o_proj, down_proj")
    if settings.weights != "object_store":
        why = "and vLLM's transfer engines load whole models"
        _refuse(settings, "weights", why, "object_store, or lora: null")
    if settings.tensor_parallel_dim > 1:
        _refuse(settings, "tensor_parallel_dim", "and adapters have no plan", "1, or lora: null")
    if needs_reference(settings.reward_shaping.model_dump()):
        why = "and with lora, the reference's logprobs are computed after the rewards were shaped"
        allowed = "0; loss.kl_coeff or advantages.kl_coeff instead"
        _refuse(settings, "reward_shaping.kl_coeff", why, allowed)


def check_transfer(settings: Settings) -> None:
    """Refuse a way of the weights that the devices, or the roles' places on them, do not have."""
    if settings.weights == "object_store":
        return
    if settings.push == "delta":
        _refuse(settings, "push", f"and {settings.weights} sends whole weights", "whole")
    if settings.train_from or settings.device == "cpu":
        why = "and device is cpu" if settings.device == "cpu" else "and train_from has no vLLM"
        _refuse(settings, "weights", why, "object_store")
    trainer, generator = settings.gpus_per_trainer, settings.gpus_per_generator
    if settings.colocate or trainer + generator <= 1:
        why = "and NCCL lets no two roles share a GPU"
        allowed = "object_store, or GPU shares of more than 1 together, without colocate"
        _refuse(settings, "weights", why, allowed)


def _check_curriculum(settings: Settings) -> None:
    rule = settings.curriculum
    if rule is None:
        return
    if rule.low > rule.high:
        why = f"and curriculum.high is {rule.high:g}"
        _refuse(settings, "curriculum.low", why, f"at most {rule.high:g}")
    if not settings.shuffle:
        why = "and a curriculum draws the prompts at random"
        _refuse(settings, "shuffle", why, "true, or curriculum: null")
    if settings.train_from:
        fail("curriculum", "given with train_from, whose groups are recorded", "null")


def _check_reuse(settings: Settings) -> None:
    rule, batch = settings.replay_generation, settings.groups_per_step
    if rule is None:
        return
    for key in ("train_from", "rollout_only"):
        if getattr(settings, key):
            fail("replay_generation", f"given with {key}, one half of a run", "null")
    if settings.max_staleness == 0:
        problem = "given with max_staleness: 0, by which no trained group is fresh enough again"
        fail("replay_generation", problem, "null, or max_staleness: 1 or more")
    if not reused_per_step(rule.share, batch):
        why = f"and of groups_per_step: {batch}, that is less than one group"
        allowed = f"at least {1 / batch:.4g}" if batch > 1 else "groups_per_step: 2 or more"
        _refuse(settings, "replay_generation.share", why, allowed)


def _check_rewards(settings: Settings) -> None:
    if settings.reward_model.path is not None and "reward_model" in settings.rewards:
        problem = "given beside reward_model.path, whose scores have this name"
        fail("rewards.reward_model", problem, "another name")
    marked = [name for name, node in settings.rewards.items() if node.is_success]
    if len(marked) != 1:
        problem = f"is_success: true on {' and '.join(marked) or 'none'}"
        fail("rewards", problem, "exactly one reward with is_success: true")


# ---- GPUs ---------------------------------------------------------------------------------------


def check_gpus(settings: Settings, *, here: bool) -> None:
    """Refuse GPU shares that roles cannot have, and roles that do not fit onto these GPUs."""
    if here and not torch.cuda.is_available():
        fail("device", f"cuda given, and PyTorch {torch.__version__} finds no GPU", "cpu")
    counts = _roles(settings)
    shares = {role: getattr(settings, f"gpus_per_{role}") for role in counts}
    workers = settings.generator.tensor_parallel_size
    if workers > 1 and shares["generator"] < 1:
        why = f"and each of the {workers} workers of a generator needs a whole GPU"
        allowed = "1 with generator.tensor_parallel_size above 1"
        _refuse(settings, "gpus_per_generator", why, allowed)
    if counts["trainer"] > 1 and shares["trainer"] <= 0.5:
        why = "and NCCL lets no two trainers share a GPU"
        _refuse(settings, "gpus_per_trainer", why, "above 0.5 (or num_trainers: 1)")
    holder = "trainer" if settings.colocate else "generator"
    if settings.generator.gpu_memory_utilization > shares[holder]:
        why, allowed = f"more than a {holder}'s share of a GPU", f"at most gpus_per_{holder}"
        _refuse(settings, "generator.gpu_memory_utilization", why, allowed)
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
        problem += f" need {num_needed} GPUs, and there are {torch.cuda.device_count()}"
        key = "num_trainers" if settings.colocate else "num_generators"
        fail(key, problem, "fewer roles, or gpus_per_<role> below 1")


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
