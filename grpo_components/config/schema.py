"""Which keys a config has and what each may hold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

from grpo_components.errors import MAX_MESSAGE, fail, shown
from grpo_components.objective.schedules import Schedule, as_schedule
from grpo_components.plain_text import one_line, shortened

ABSENT: Any = object()


@dataclass(frozen=True)
class Rule:
    """What one key may hold, and what it holds where the config does not say."""

    kind: type
    low: float = -math.inf
    above: float = -math.inf
    high: float = math.inf
    choices: tuple[Any, ...] = ()
    null: bool = False
    schedule: bool = False
    refused: Mapping[Any, str] = field(default_factory=dict)
    """Why, of values that one might expect among the choices."""
    or_path: bool = False
    needed: bool = False
    """Among a component's arguments: the recipe reads it, too."""
    default: Any = ABSENT


Schema = Mapping[str, Any]
"""Rules by key, in the order of the configs; "*" stands for any name. Where there is `_component_`,
other keys are its arguments, and the rules are for some of them; a key whose rule has a default is
no argument but the recipe's own."""

COUNT = Rule(int, low=1)
FLAG = Rule(bool)
PATH = Rule(str)
GPU_SHARE = Rule(float, above=0, high=1, default=1.0)
COMPONENT: Schema = {"_component_": PATH}
USER: Schema = {}
"""Any keys: a fork's own, passed through as they are."""
MODEL_TYPES = ("LLAMA2", "LLAMA3", "LLAMA3_2", "MISTRAL", "GEMMA", "PHI3_MINI", "PHI4", "QWEN2")
REFUSED_MODEL_TYPES = {
    "GEMMA2": "torchtune 0.6.1 swaps Gemma 2's norms and caps its hidden state, not its logits",
    "LLAMA3_VISION": "it is multimodal, and prompts and responses are text here",
    "CLIP_TEXT": "it is an encoder, and generates no text",
    "T5_ENCODER": "it is an encoder, and generates no text",
    "REWARD": "it gives scores, and generates no text",
}
MODEL_TYPE = Rule(str, choices=MODEL_TYPES, refused=REFUSED_MODEL_TYPES, needed=True)
DATASET: Schema = {
    "_component_": PATH,
    "source": PATH,
    "max_prompt_tokens": Rule(int, low=1, null=True),
    "num_rows": Rule(int, low=1, null=True),
}
TIMEOUTS = {"startup_s": 600.0, "rollout_s": 600.0, "batch_s": 1200.0, "train_step_s": 1800.0}
TIMEOUTS |= {
    "weights_s": 300.0,
    "reward_s": 10.0,
    "collective_s": 600.0,
    "shutdown_s": 20.0,
    "heartbeat_s": 60.0,
}
REWARD_KEYS = {"weight": Rule(float, default=1.0), "is_success": Rule(bool, default=False)}
LR_SCHEDULER: Schema = {"_component_": PATH, "num_warmup_steps": Rule(int, low=0)}  # may be null
PTX: Schema = {  # may be null
    "_component_": PATH,
    "coeff": Rule(float, low=0),
    "examples_per_update": COUNT,
    "seed": Rule(int, low=0),
}
CLIP: Schema = {  # of the recipe's own loss; a component may have other arguments
    "clip_low": Rule(float, above=0, high=1, schedule=True, default=0.2),
    "clip_high": Rule(float, above=0, schedule=True, default=0.2),
}
PENALTIES: Schema = {  # beside any loss
    "kl_coeff": Rule(float, low=0, schedule=True, default=0.0),
    "kl_estimator": Rule(str, choices=("k1", "k2", "k3"), default="k3"),
    "entropy_coeff": Rule(float, low=0, default=0.0),
}
LOSS: Schema = {**CLIP, **PENALTIES}
COMPONENT_LOSS: Schema = {
    "_component_": PATH,
    **{name: replace(rule, default=ABSENT) for name, rule in CLIP.items()},
    **PENALTIES,
}
# Sampler settings by vLLM's names, each with the value that leaves the distribution as it is.
TRUNCATION: dict[str, float] = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
TRUNCATION |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
SCHEMA: Schema = {
    "output_dir": PATH,
    "base_model_path": PATH,
    "seed": Rule(int, low=0, high=2**31 - 1),
    "device": Rule(str, choices=("cpu", "cuda")),
    "dtype": Rule(str, choices=("fp32", "bf16")),
    "log_level": Rule(str, choices=("DEBUG", "INFO", "WARNING", "ERROR")),
    "model": COMPONENT,
    "tokenizer": {
        **{"_component_": PATH, "path": PATH, "merges_file": PATH},
        "special_tokens_path": Rule(str, null=True),
        "max_seq_len": Rule(int, low=1, null=True),
    },
    "checkpointer": {"_component_": PATH, "model_type": MODEL_TYPE},
    "resume_from_checkpoint": Rule(bool, or_path=True),
    "dataset": DATASET,
    "eval_dataset": DATASET,
    "shuffle": FLAG,
    "environment": {"_component_": PATH, "max_turns": COUNT},
    "rewards": {"*": {"_component_": PATH, **REWARD_KEYS}},
    "num_generators": COUNT,
    "num_trainers": COUNT,
    "num_references": Rule(int, low=0),
    "gpus_per_generator": GPU_SHARE,
    "gpus_per_trainer": GPU_SHARE,
    "gpus_per_reference": GPU_SHARE,
    "rollouts_in_flight": COUNT,
    "push_every_n_steps": COUNT,
    "pull_every_m_rollouts": COUNT,
    "max_staleness": Rule(int, low=0),
    "stale_groups": Rule(str, choices=("drop", "wait")),
    "stale_tokens": Rule(str, choices=("drop", "mask"), default="drop"),
    "recompute_kv_after_pull": FLAG,
    "num_steps": COUNT,
    "groups_per_step": COUNT,
    "group_size": Rule(int, low=2),
    "ppo_epochs": COUNT,
    "updates_per_batch": COUNT,
    "tokens_per_micro_batch": COUNT,
    "loss": LOSS,
    "advantages": COMPONENT,
    "aggregation": COMPONENT,
    "off_policy": COMPONENT,
    "reward_shaping": {
        "kl_coeff": Rule(float, low=0, schedule=True, default=0.0),
        "kl_estimator": Rule(str, choices=("k1", "k2", "k3"), default="k1"),
        "overlong_tokens": Rule(int, low=0, default=0),
        "overlong_penalty": Rule(float, low=0, default=1.0),
    },
    "mask_overlong": Rule(bool, default=False),
    "dynamic_sampling": {
        "enabled": Rule(bool, default=False),
        "max_discarded": Rule(int, low=1, default=256),
    },
    "optimizer": {"_component_": PATH, "lr": Rule(float, above=0, schedule=True)},
    "lr_scheduler": LR_SCHEDULER,
    "clip_grad_norm": Rule(float, above=0, null=True),
    "enable_activation_checkpointing": FLAG,
    "compile": FLAG,
    "generator": {
        "max_response_tokens": COUNT,
        "temperature": Rule(float, above=0, schedule=True),
        "stop_token_ids": Rule(list, null=True, default=None),
        "max_model_len": Rule(int, low=2, null=True, default=None),
        "max_num_seqs": Rule(int, low=1, default=256),
        "gpu_memory_utilization": Rule(float, above=0, high=1, default=0.85),
        "kv_cache_gib": Rule(int, low=1, default=1),
        "enforce_eager": Rule(bool, null=True, default=None),  # null: true on cpu, false on cuda
        **{name: Rule(type(unbent), default=unbent) for name, unbent in TRUNCATION.items()},
        "allow_biased_sampling": Rule(bool, default=False),
    },
    "save_every_n_steps": COUNT,
    "eval_every_n_steps": COUNT,
    "metric_logger": COMPONENT,
    "log_every_n_steps": COUNT,
    "log_peak_memory_stats": FLAG,
    "profiler": {
        "_component_": PATH,
        "enabled": Rule(bool, default=False),
        "wait_steps": Rule(int, low=0, null=True),
        "warmup_steps": Rule(int, low=0, null=True),
        "active_steps": Rule(int, low=1, null=True),
        "num_cycles": Rule(int, low=0, null=True),
    },
    "ptx": PTX,
    "eval": {
        "samples_per_prompt": Rule(int, low=1, default=1),
        "temperature": Rule(float, low=0, null=True, default=None),  # null: generator.temperature
        "allow_other_prompts": Rule(bool, default=False),
    },
    "eval_only": Rule(bool, or_path=True, default=False),
    "rollout_only": Rule(bool, default=False),
    "train_from": Rule(str, null=True, default=None),  # trajectories.jsonl of a rollout_only run
    "max_restarts": Rule(int, low=0, default=8),  # of all roles together, within restart_window_s
    "restart_window_s": Rule(float, above=0, default=3600.0),
    "min_generators": Rule(int, low=1, null=True, default=None),  # null: all of them
    "replay_events": Rule(str, null=True, default=None),
    "reward_model": {
        "path": Rule(str, null=True, default=None),
        "weight": Rule(float, default=1.0),
        "chat_template": Rule(bool, default=False),
        "tokens_per_micro_batch": Rule(int, low=1, default=8192),
    },
    "gpus_per_reward_model": GPU_SHARE,
    "max_failed_samples": Rule(int, low=1, default=64),  # between two training steps
    "object_store_memory": Rule(int, low=75 * 2**20, null=True, default=None),  # bytes, of Ray
    "max_skipped_steps": Rule(int, low=1, default=10),  # in a row
    "max_generator_kl": Rule(float, above=0, null=True, default=None),  # null: by dtype
    "packing": Rule(bool, default=False),
    "keep_last_n": Rule(int, low=1, null=True, default=None),
    "keep_best": Rule(str, null=True, default=None),  # eval/success_rate, eval/pass_at_4, ...
    "async_checkpoint": Rule(bool, default=False),
    "checkpoint_failure": Rule(str, choices=("error", "warn"), default="error"),
    "reward_workers": Rule(int, low=1, default=1),
    "rollouts_logged_per_step": Rule(int, low=0, default=1),
    "log_token_logprobs": Rule(bool, default=False),  # in the rollouts that are logged
    "logprob_chunk_tokens": Rule(int, low=1, default=1024),
    "data_parallel_replicate_dim": Rule(int, low=1, default=1),
    "tensor_parallel_dim": Rule(int, low=1, default=1),
    "reduce_dtype": Rule(str, choices=("fp32", "bf16"), default="fp32"),
    "enable_activation_offloading": Rule(bool, default=False),
    "fsdp_cpu_offload": Rule(bool, default=False),
    "timeouts": {key: Rule(float, above=0, default=TIMEOUTS[key]) for key in TIMEOUTS},
    "user": USER,
}
SCHEDULED = frozenset(
    f"{section}.{name}"
    for section, rules in SCHEMA.items()
    if not isinstance(rules, Rule)
    for name, rule in rules.items()
    if isinstance(rule, Rule) and rule.schedule
)
"""Keys whose number may follow a schedule."""
KIND_WORDS = {int: "a whole number", float: "a number", bool: "true | false", str: "text"}


def bending(generator: Mapping[str, Any]) -> list[str]:
    """Sampler settings by which tokens come from another distribution than the trainer's.

    Args:
        generator: that section, with its defaults.
    """
    off = {"top_k": (0, -1)}  # vLLM has two words for it
    return [
        name for name, plain in TRUNCATION.items() if generator[name] not in off.get(name, (plain,))
    ]


def read_section(schema: Schema, given: Any, key: str) -> Any:
    """Values of one section with its defaults filled in.

    Args:
        schema: of the section.
        given: what the config has there.
        key: of the section; empty for the whole config.

    Raises:
        ValueError: for the first value that no rule allows.
    """
    if schema is USER:
        return _user_section(given, key)
    if isinstance(given, dict) and given.get("_component_", "") is None:
        given = None  # what `lr_scheduler=null` on the command line comes to
    if schema is LOSS and isinstance(given, str):
        fail(key, f"{shown(given)} given", f"loss._component_={given}")
    if schema is LOSS and isinstance(given, dict) and "_component_" in given:
        schema = COMPONENT_LOSS
    is_node, prefix = "_component_" in schema, f"{key}." if key else ""
    if given is None and schema in (LR_SCHEDULER, PTX):
        return None
    if "*" in schema:
        if not isinstance(given, dict) or not given:
            fail(key, f"{shown(given)} given", "one `_component_` or more, each under a name")
        nodes = given.items()
        return {name: read_section(schema["*"], node, f"{key}.{name}") for name, node in nodes}
    given = {} if given is None and not is_node else given
    if not isinstance(given, dict) or (is_node and "_component_" not in given):
        keys = "_component_ and its arguments" if is_node else ", ".join(schema)
        fail(key, f"{shown(given)} given", f"a mapping with {keys}")
    for name in given:
        if name not in schema and not is_node:
            fail(f"{prefix}{name}", "unknown key", nearest(str(name), schema, prefix))
    values = {}
    for name, rule in schema.items():
        if not isinstance(rule, Rule):
            values[name] = read_section(rule, given.get(name), f"{prefix}{name}")
        elif name in given or rule.default is not ABSENT or rule.needed or not is_node:
            values[name] = _read_value(rule, given.get(name, rule.default), f"{prefix}{name}")
    return {**given, **values} if is_node else values


def _user_section(given: Any, key: str) -> dict[Any, Any]:
    if given is not None and not isinstance(given, dict):
        fail(key, f"{shown(given)} given", "a mapping with any keys of your own")
    return given or {}


def _read_value(rule: Rule, given: Any, key: str) -> Any:
    if rule.schedule and isinstance(given, dict):
        schedule = _as_schedule(key, given)
        for name, value in (("start", schedule.start), ("end", schedule.end)):
            if not _fits(rule, value):
                fail(f"{key}.{name}", f"{shown(value)} given", _allowed(rule))
        return given
    if not _fits(rule, given):
        problem = "missing" if given is ABSENT else f"{shown(given)} given"
        why = rule.refused.get(given) if isinstance(given, str) else None
        fail(key, f"{problem}, but {why}" if why else problem, _allowed(rule))
    return float(given) if rule.kind is float and given is not None else given


def _as_schedule(key: str, given: dict[str, Any]) -> Schedule:
    try:
        return as_schedule(key, given)
    except ValueError as error:
        raise ValueError(shortened(one_line(str(error)), MAX_MESSAGE)) from error


def _fits(rule: Rule, given: Any) -> bool:
    if given is None:
        return rule.null
    if rule.or_path and isinstance(given, str):
        return given != ""
    if rule.kind in (int, float):
        kinds = (int, float) if rule.kind is float else int
        is_number = isinstance(given, kinds) and not isinstance(given, bool)
        return is_number and rule.above < given < math.inf and rule.low <= given <= rule.high
    if rule.kind is list:
        return isinstance(given, list) and all(type(item) is int for item in given)
    return isinstance(given, rule.kind) and given in (rule.choices or (given,)) and given != ""


def _allowed(rule: Rule) -> str:
    words = " | ".join(shown(choice).strip("'") for choice in rule.choices)
    if not rule.choices:
        limits = (("above", rule.above), ("at least", rule.low), ("at most", rule.high))
        bounds = [f"{word} {limit:.10g}" for word, limit in limits if math.isfinite(limit)]
        words = f"{KIND_WORDS.get(rule.kind, 'a list of token ids')} {' and '.join(bounds)}"
    words += " or null" if rule.null else " | a path" if rule.or_path else ""
    return words + (", or a schedule" if rule.schedule else "")


def nearest(name: str, keys: Mapping[str, Any] | list[str], prefix: str) -> str:
    """Name the key that was probably meant: of this section, else of any other."""
    if near := get_close_matches(name, keys, n=1, cutoff=0.75):
        return f"did you mean {prefix}{near[0]}?"
    sections = {key: rule for key, rule in SCHEMA.items() if isinstance(rule, Mapping)}
    anywhere = {leaf: f"{key}.{leaf}" for key, rule in [*sections.items()][::-1] for leaf in rule}
    anywhere |= {key: key for key in SCHEMA}
    if near := get_close_matches(name, anywhere, n=1, cutoff=0.8):
        return f"did you mean {anywhere[near[0]]}?"
    return ", ".join(keys) or "none" if prefix else "the keys that `tune cat tiny_async_grpo` shows"
