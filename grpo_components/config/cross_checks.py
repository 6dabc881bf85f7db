"""Checks config values against each other and against this machine, without reading files."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import psutil
from omegaconf import OmegaConf

from grpo_components.config.colocate_checks import check_colocated
from grpo_components.config.lora_checks import check_lora
from grpo_components.config.prompts import check_curriculum
from grpo_components.config.reuse import check_reuse
from grpo_components.config.training_checks import check_training
from grpo_components.config.transfer_checks import check_transfer
from grpo_components.errors import fail, shown
from grpo_components.evaluation.metrics import check_keep_best
from grpo_components.exchange.staleness import StalenessContract
from grpo_components.objective.schedules import as_schedule
from grpo_components.settings import TRUNCATION, Settings, biasing

_PACKAGES = {"TensorBoardLogger": "tensorboard", "WandBLogger": "wandb", "CometLogger": "comet_ml"}


def check_together(settings: Settings) -> None:
    """Refuse values that contradict each other or that this machine cannot hold."""
    _check_memory(settings)
    _check_asynchrony(settings)
    check_colocated(settings)
    _check_objective(settings)
    _check_generation(settings)
    _check_lengths(settings)
    check_training(settings)
    check_lora(settings)
    check_transfer(settings)
    check_keep_best(settings)
    check_curriculum(settings)
    check_reuse(settings)
    _check_rewards(settings)
    _check_logging(settings)


def kl_sections(settings: Settings) -> dict[str, Mapping[Any, Any]]:
    """Return the sections that may have a `kl_coeff`, by key."""
    shaping = settings.reward_shaping.model_dump()
    return {"loss": settings.loss, "reward_shaping": shaping, "advantages": settings.advantages}


def needs_reference(section: Mapping[Any, Any]) -> bool:
    """Whether a section needs the reference: its `kl_coeff` (number or schedule) ever exceeds 0."""
    return as_schedule("kl_coeff", section.get("kl_coeff", 0)).highest > 0


def _check_memory(settings: Settings) -> None:
    memory = psutil.virtual_memory().total
    if settings.object_store_memory is not None and settings.ray.address is not None:
        problem = "given with ray.address, whose cluster has a store of its own"
        fail("object_store_memory", problem, "null (or `ray start --object-store-memory`)")
    if (settings.object_store_memory or 0) > memory:
        problem = f"{settings.object_store_memory} given, more than the memory of this machine"
        fail("object_store_memory", problem, f"at most {memory}")
    cache_gib = settings.generator.kv_cache_gib or 0.0
    if settings.device == "cpu" and cache_gib > memory // 2**30:
        problem = f"{cache_gib:.12g} given, more than the memory of this machine"
        fail("generator.kv_cache_gib", problem, f"at most {memory // 2**30}")


def _check_asynchrony(settings: Settings) -> None:
    contract = StalenessContract(settings.max_staleness, settings.groups_per_step)
    push, most = settings.push_every_n_steps, contract.max_push_interval
    if push > most:
        problem = f"{push} given, which would deadlock: rollouts wait for a push, and it for them"
        fail("push_every_n_steps", problem, f"at most max_staleness + 1 = {most}")
    if (settings.min_generators or 1) > settings.num_generators:
        problem = f"{settings.min_generators} given with num_generators: {settings.num_generators}"
        fail("min_generators", problem, "at most num_generators, or null for all of them")


def _check_objective(settings: Settings) -> None:
    as_schedule("advantages.kl_coeff", settings.advantages.get("kl_coeff", 0))
    for key, section in kl_sections(settings).items():
        has_reference = settings.num_references > 0 or settings.lora is not None
        if needs_reference(section) and not has_reference:
            problem = f"0 given with {key}.kl_coeff: {shown(section['kl_coeff'])}"
            fail("num_references", problem, f"at least 1, or {key}.kl_coeff: 0")
    if OmegaConf.is_dict(settings.optimizer.get("lr")) and settings.lr_scheduler:
        fail("lr_scheduler", "given beside a schedule for optimizer.lr", "null, or a number there")
    correction = settings.off_policy["_component_"]
    weighs = correction.rpartition(".")[2] in ("TokenTIS", "SequenceTIS", "MaskedIS")
    if weighs and settings.loss.get("_component_", "").endswith(".DecoupledPPOLoss"):
        problem = f"{correction} given, and DecoupledPPOLoss has such weights already"
        fail("off_policy", problem, "NoCorrection, GeometricMask or OffPolicySequenceMask")
    most = settings.generator.max_response_tokens
    if settings.reward_shaping.overlong_tokens > most:
        problem = f"{settings.reward_shaping.overlong_tokens} given"
        allowed = f"at most generator.max_response_tokens = {most}"
        fail("reward_shaping.overlong_tokens", problem, allowed)


def _check_generation(settings: Settings) -> None:
    generator = settings.generator
    schedule = as_schedule("generator.temperature", generator.temperature)
    if schedule.warmup_steps and schedule(0) < 0.01:
        problem = f"{schedule.warmup_steps} given: the first step would have {schedule(0):.3g}, "
        problem += "and vLLM samples at 0.01 to 2"
        fail("generator.temperature.warmup_steps", problem, f"at most {int(schedule.start / 0.01)}")
    for name in biasing(generator) if not generator.allow_biased_sampling else ():
        problem = f"{getattr(generator, name):g} given: the generator would sample from another "
        problem += "distribution than the trainer computes, and every ratio would be wrong"
        allowed = f"{TRUNCATION[name]:g}, or generator.allow_biased_sampling: true"
        fail(f"generator.{name}", problem, allowed)


def _check_lengths(settings: Settings) -> None:
    response = settings.generator.max_response_tokens
    turns = settings.environment.get("max_turns")
    if turns is not None and turns > response:
        problem = f"{turns} given, and each turn takes at least one token of a response"
        allowed = f"at most generator.max_response_tokens = {response}"
        fail("environment.max_turns", problem, allowed)
    prompt = settings.dataset.get("max_prompt_tokens") or 1
    limits = {
        "tokens_per_micro_batch": settings.tokens_per_micro_batch,
        "generator.max_model_len": settings.generator.max_model_len,
    }
    for key, limit in limits.items():
        if limit is not None and limit < prompt + response:
            problem = f"{limit} given, less than a prompt ({prompt}) and the longest response"
            fail(key, problem, f"at least {prompt + response}")


def _check_rewards(settings: Settings) -> None:
    if settings.reward_model.path is not None and "reward_model" in settings.rewards:
        problem = "given beside reward_model.path, whose scores have this name"
        fail("rewards.reward_model", problem, "another name")
    marked = [name for name, node in settings.rewards.items() if node.is_success]
    if len(marked) != 1:
        problem = f"is_success: true on {' and '.join(marked) or 'none'}"
        fail("rewards", problem, "exactly one reward with is_success: true")


def _check_logging(settings: Settings) -> None:
    if settings.log_token_logprobs and settings.rollouts_logged_per_step == 0:
        problem = "true given with rollouts_logged_per_step: 0, which logs no rollout"
        fail("log_token_logprobs", problem, "false, or rollouts_logged_per_step: 1 or more")
    logger = settings.metric_logger["_component_"].rpartition(".")[2]
    package = _PACKAGES.get(logger, "torchtune")
    if find_spec(package) is None:
        problem = f"{logger} needs the package {package}, which is not installed"
        fail("metric_logger", problem, f"another logger, or `pip install {package}` first")
