"""Upper bounds of every number in a config, each with its reason, and of their products."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import psutil

from grpo_components.objective.schedules import as_schedule
from grpo_components.running.config_schema import SCHEDULED, fail, shown


class Bound(NamedTuple):
    """Between which values a number makes sense."""

    high: float
    why: str
    low: float = -math.inf


_COUNTER = Bound(2**31 - 1, "policy versions and steps are 32-bit numbers")
_TOKENS = Bound(2**22, "no supported model knows so many positions")
_PROCESSES = Bound(1024, "each is a process of its own")
_BUDGET = Bound(2**31 - 1, "token positions are 32-bit numbers")
_COEFF = Bound(1e6, "the loss would leave float32", -1e6)
_WEIGHT = Bound(1e6, "advantages would leave float32", -1e6)
_SECONDS = Bound(2e6, "time-outs are 32-bit milliseconds, 24 days", 0.1)
_SIZE = Bound(2**22, "no supported model has a layer so wide", 1)
_SAMPLES = Bound(2**16, "a step's samples are laid out in the driver")
_GPU = Bound(1, "Ray counts shares of a GPU in ten thousandths", 0.001)
_VLLM = "vLLM takes no other"

BOUNDS: Mapping[str, Bound] = {
    "seed": Bound(2**31 - 1, "random generators take 32 bits"),
    "model.vocab_size": _SIZE,
    "model.num_layers": Bound(1024, "no supported model has so many", 1),
    "model.num_heads": Bound(4096, "no supported model has so many", 1),
    "model.num_kv_heads": Bound(4096, "no supported model has so many", 1),
    "model.head_dim": Bound(2**16, "no supported model has a layer so wide", 1),
    "model.embed_dim": _SIZE,
    "model.intermediate_dim": _SIZE,
    "model.max_seq_len": Bound(_TOKENS.high, _TOKENS.why, 1),
    "model.attn_dropout": Bound(1, "it is a probability", 0),
    "model.norm_eps": Bound(1, "it is added to a mean square", 0),
    "model.rope_base": Bound(1e12, "float32 angles would all be 0", 1),
    "tokenizer.max_seq_len": Bound(_TOKENS.high, _TOKENS.why, 1),
    "dataset.max_prompt_tokens": _TOKENS,
    "dataset.num_rows": _COUNTER,
    "eval_dataset.max_prompt_tokens": _TOKENS,
    "eval_dataset.num_rows": _COUNTER,
    "environment.max_turns": _TOKENS,
    "rewards.*.weight": _WEIGHT,
    "num_generators": _PROCESSES,
    "num_trainers": _PROCESSES,
    "num_references": _PROCESSES,
    **{f"gpus_per_{role}": _GPU for role in ("generator", "trainer", "reference", "reward_model")},
    "rollouts_in_flight": Bound(2**14, "each is a thread of a generator"),
    "push_every_n_steps": _COUNTER,
    "pull_every_m_rollouts": _COUNTER,
    "max_staleness": Bound(10**6, "the replay buffer keeps a place for every group"),
    "num_steps": _COUNTER,
    "groups_per_step": _SAMPLES,
    "group_size": _SAMPLES,
    "ppo_epochs": Bound(10**4, "one step would never end"),
    "updates_per_batch": _SAMPLES,
    "tokens_per_micro_batch": _BUDGET,
    "loss.clip_high": Bound(1e6, "a ratio's square would leave float32"),
    "loss.kl_coeff": _COEFF,
    "loss.entropy_coeff": _COEFF,
    "reward_shaping.kl_coeff": _COEFF,
    "reward_shaping.overlong_tokens": _TOKENS,
    "reward_shaping.overlong_penalty": _WEIGHT,
    "dynamic_sampling.max_discarded": _COUNTER,
    "optimizer.lr": Bound(1e3, "weights would leave float32 in a few steps"),
    "optimizer.weight_decay": Bound(1e3, "weights would leave float32 in a few steps", 0),
    "optimizer.momentum": Bound(1e3, "weights would leave float32 in a few steps"),
    "optimizer.eps": Bound(1e3, "no update would be left", 0),
    "lr_scheduler.num_warmup_steps": _COUNTER,
    "clip_grad_norm": Bound(1e30, "its square would leave float64 with that of a gradient"),
    "generator.max_response_tokens": _TOKENS,
    "generator.temperature": Bound(2, "vLLM samples at 0.01 to 2", 0.01),
    "generator.max_model_len": _TOKENS,
    "generator.max_num_seqs": Bound(4096, "an engine step batches at most 4096 tokens on a CPU"),
    "generator.kv_cache_gib": Bound(2**20, "no machine has so much memory"),
    "generator.top_p": Bound(1, _VLLM, 1e-6),
    "generator.top_k": Bound(2**31 - 1, _VLLM, -1),
    "generator.min_p": Bound(1, _VLLM, 0),
    "generator.presence_penalty": Bound(2, _VLLM, -2),
    "generator.frequency_penalty": Bound(2, _VLLM, -2),
    "generator.repetition_penalty": Bound(1e3, "float32 logits are divided by it", 1e-3),
    "save_every_n_steps": _COUNTER,
    "eval_every_n_steps": _COUNTER,
    "log_every_n_steps": _COUNTER,
    "profiler.wait_steps": _COUNTER,
    "profiler.warmup_steps": _COUNTER,
    "profiler.active_steps": _COUNTER,
    "profiler.num_cycles": _COUNTER,
    "ptx.coeff": _COEFF,
    "ptx.examples_per_update": _SAMPLES,
    "ptx.seed": Bound(2**31 - 1, "random generators take 32 bits"),
    "eval.samples_per_prompt": Bound(2**14, "an evaluation's samples are laid out in a generator"),
    "eval.temperature": Bound(2, "vLLM samples at 0, or at 0.01 to 2"),
    "max_restarts": _COUNTER,
    "restart_window_s": Bound(1e9, "no run lives for decades"),
    "min_generators": _PROCESSES,
    "reward_model.weight": _WEIGHT,
    "reward_model.tokens_per_micro_batch": _BUDGET,
    "max_failed_samples": _COUNTER,
    "max_generator_kl": Bound(1e3, "k3 of two policies without a token in common is some hundred"),
    "max_skipped_steps": _COUNTER,
    "keep_last_n": _COUNTER,
    "reward_workers": _PROCESSES,
    "rollouts_logged_per_step": _COUNTER,
    "logprob_chunk_tokens": _BUDGET,
    "data_parallel_replicate_dim": _PROCESSES,
    "tensor_parallel_dim": _PROCESSES,
    **{
        f"timeouts.{name}_s": _SECONDS
        for name in (
            *("startup", "rollout", "batch", "train_step", "weights", "reward", "collective"),
            *("shutdown", "heartbeat"),
        )
    },
}
"""By key; "*" stands for any name. What is not here has its upper bound in the schema."""

PRODUCTS: Mapping[tuple[str, ...], Bound] = {
    ("groups_per_step", "group_size"): Bound(2**20, "samples of one step, laid out in the driver"),
    ("rollouts_in_flight", "group_size"): Bound(2**16, "requests that one engine would hold"),
    ("num_generators", "rollouts_in_flight"): Bound(2**16, "tasks of the driver"),
    ("max_staleness", "groups_per_step"): Bound(2**22, "groups the replay buffer has places for"),
    ("ppo_epochs", "updates_per_batch"): Bound(2**20, "optimizer updates of one step"),
    ("generator.max_num_seqs", "generator.max_model_len"): Bound(
        2**31, "token ids that vLLM keeps a table for"
    ),
    ("ptx.examples_per_update", "updates_per_batch"): Bound(2**22, "examples of one step"),
}
"""By the keys that are multiplied; a key that is null or a schedule counts as 1."""


def check_bounds(values: Mapping[str, Any]) -> None:
    """Refuse numbers that their rules allow and no run can have.

    Args:
        values: of a config, each within its own rule.

    Raises:
        ValueError: naming the key, why it is too much, and the bound.
    """
    for pattern, bound in BOUNDS.items():
        for key, value in _found(values, pattern):
            _check(key, value, bound)
    for keys, bound in PRODUCTS.items():
        numbers = [value for key in keys for _, value in _found(values, key)]
        product = math.prod(n for n in numbers if isinstance(n, int | float))
        if product > bound.high:
            factors = " x ".join(keys[1:])
            problem = f"{shown(numbers[0])} given, x {factors} = {product:.10g} {bound.why}"
            fail(keys[0], problem, f"at most {bound.high:.10g} of them")
    _check_temperatures(values)
    memory = psutil.virtual_memory().total // 2**30
    if values["device"] == "cpu" and values["generator"]["kv_cache_gib"] > memory:
        problem = (
            f"{values['generator']['kv_cache_gib']} given, more than the memory of this machine"
        )
        fail("generator.kv_cache_gib", problem, f"at most {memory}")


def check_against_model(values: Mapping[str, Any], hf_config: Mapping[str, Any]) -> None:
    """Compare settings of the engine with the model that it loads.

    Args:
        values: of a config, each within its own rule.
        hf_config: of the base model.

    Raises:
        ValueError: naming the key.
    """
    engine, vocab = values["generator"], hf_config.get("vocab_size")
    for token in engine["stop_token_ids"] or ():
        if token < 0 or (isinstance(vocab, int) and token >= vocab):
            known = f"0 to {vocab - 1}" if isinstance(vocab, int) else "0 and above"
            problem = f"{shown(token)} given, which the model cannot sample"
            fail("generator.stop_token_ids", problem, f"token ids of {known}")
    known = hf_config.get("max_position_embeddings")
    most, longest = engine["max_model_len"], known if isinstance(known, int) else math.inf
    if most is not None and most > longest:
        problem = f"{most} given, and the model knows {known} positions"
        fail("generator.max_model_len", problem, f"at most {known}")


def _found(values: Mapping[str, Any], pattern: str) -> list[tuple[str, Any]]:
    """What a config has for a key of a table."""
    found: list[tuple[str, Any]] = [("", values)]
    for name in pattern.split("."):
        inner = [(key, value) for key, value in found if isinstance(value, Mapping)]
        found = [
            (f"{key}.{n}" if key else n, value[n])
            for key, value in inner
            for n in (value if name == "*" else [name] if name in value else [])
        ]
    return found


def _check(key: str, value: Any, bound: Bound) -> None:
    if value is None:
        return
    numbers = {key: value}
    if isinstance(value, Mapping) and key in SCHEDULED:
        schedule = as_schedule(key, value)
        numbers = {f"{key}.start": schedule.start, f"{key}.end": schedule.end}
        for name, steps in (
            ("num_steps", schedule.num_steps),
            ("warmup_steps", schedule.warmup_steps),
        ):
            _check(f"{key}.{name}", steps, _COUNTER)
    for where, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int | float):
            fail(where, f"{shown(number)} given", "a number")
        if not bound.low <= number <= bound.high:
            low = f"at least {bound.low:.10g} and " if math.isfinite(bound.low) else ""
            allowed = f"{low}at most {bound.high:.10g}"
            fail(where, f"{shown(number)} given, and {bound.why}", allowed)


def _check_temperatures(values: Mapping[str, Any]) -> None:
    low = BOUNDS["generator.temperature"].low
    schedule = as_schedule("generator.temperature", values["generator"]["temperature"])
    if schedule.warmup_steps and schedule(0) < low:
        problem = f"{schedule.warmup_steps} given: the first step would have {schedule(0):.3g}, "
        problem += "and vLLM samples at 0.01 to 2"
        most = int(schedule.start / low)
        fail("generator.temperature.warmup_steps", problem, f"at most {most}")
    evaluated = values["eval"]["temperature"]
    if evaluated is not None and 0 < evaluated < low:
        problem = f"{evaluated:g} given, and vLLM samples at 0, or at 0.01 to 2"
        fail("eval.temperature", problem, "0, or 0.01 to 2")
