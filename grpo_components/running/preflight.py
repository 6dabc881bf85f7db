"""Checks a config before anything starts: what cannot run ends here, in one line naming the key."""

from __future__ import annotations

import inspect
import json
import math
import os
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torchtune import config
from torchtune.config._utils import _get_component_from_path
from torchtune.training import FormattedCheckpointFiles

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
MODEL_TYPES = ("LLAMA2", "LLAMA3", "LLAMA3_2", "MISTRAL", "GEMMA", "PHI3_MINI", "PHI4", "QWEN2")
DATASET: Schema = {
    "_component_": PATH,
    "source": PATH,
    "max_prompt_tokens": Rule(int, low=1, null=True),
    "num_rows": Rule(int, low=1, null=True),
}
TIMEOUTS = {"startup_s": 600.0, "rollout_s": 600.0, "batch_s": 1200.0, "train_step_s": 1800.0}
TIMEOUTS |= {"weights_s": 300.0, "reward_s": 10.0, "collective_s": 600.0, "shutdown_s": 20.0}
REWARD_KEYS = {"weight": Rule(float, default=1.0), "is_success": Rule(bool, default=False)}
LR_SCHEDULER: Schema = {"_component_": PATH, "num_warmup_steps": Rule(int, low=0)}  # may be null
SCHEMA: Schema = {
    "output_dir": PATH,
    "base_model_path": PATH,
    "seed": Rule(int, low=0, high=2**31 - 1),
    "device": Rule(str, choices=("cpu", "cuda")),
    "dtype": Rule(str, choices=("fp32", "bf16")),
    "log_level": Rule(str, choices=("DEBUG", "INFO", "WARNING", "ERROR")),
    "model": COMPONENT,
    "tokenizer": {"_component_": PATH, "path": PATH, "merges_file": PATH},
    "checkpointer": {"_component_": PATH, "model_type": Rule(str, choices=MODEL_TYPES)},
    "resume_from_checkpoint": Rule(bool, choices=(False,)),  # resume is not built yet
    "dataset": DATASET,
    "eval_dataset": DATASET,
    "shuffle": FLAG,
    "environment": COMPONENT,
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
    "recompute_kv_after_pull": FLAG,
    "num_steps": COUNT,
    "groups_per_step": COUNT,
    "group_size": Rule(int, low=2),
    "ppo_epochs": COUNT,
    "updates_per_batch": COUNT,
    "tokens_per_micro_batch": COUNT,
    "loss": {
        "_component_": PATH,
        "clip_low": Rule(float, above=0, high=1),
        "clip_high": Rule(float, above=0),
        "kl_coeff": Rule(float, low=0),
    },
    "advantages": COMPONENT,
    "optimizer": {"_component_": PATH, "lr": Rule(float, above=0)},
    "lr_scheduler": LR_SCHEDULER,
    "clip_grad_norm": Rule(float, above=0, null=True),
    "enable_activation_checkpointing": FLAG,
    "compile": FLAG,
    "generator": {
        "max_response_tokens": COUNT,
        "temperature": Rule(float, above=0),
        "stop_token_ids": Rule(list, null=True, default=None),
        "max_model_len": Rule(int, low=2, null=True, default=None),
        "max_num_seqs": Rule(int, low=1, default=256),
        "gpu_memory_utilization": Rule(float, above=0, high=1, default=0.85),
        "kv_cache_gib": Rule(int, low=1, default=1),
        "enforce_eager": Rule(bool, null=True, default=None),  # null: true on cpu, false on cuda
    },
    "save_every_n_steps": COUNT,
    "eval_every_n_steps": COUNT,
    "metric_logger": COMPONENT,
    "log_every_n_steps": COUNT,
    "log_peak_memory_stats": FLAG,
    "profiler": {"_component_": PATH, "enabled": Rule(bool, choices=(False,))},  # nor is this
    "reward_workers": Rule(int, low=1, default=1),
    "rollouts_logged_per_step": Rule(int, low=0, default=1),
    "logprob_chunk_tokens": Rule(int, low=1, default=1024),
    "timeouts": {key: Rule(float, above=0, default=TIMEOUTS[key]) for key in TIMEOUTS},
}
# What the recipe adds to a component's arguments: how many leading ones, and which by name.
ADDED: dict[str, tuple[int, tuple[str, ...]]] = {
    "dataset": (1, ()),
    "eval_dataset": (1, ()),
    "environment": (0, ("num_slots", "decode", "score")),
    "optimizer": (1, ()),
    "lr_scheduler": (1, ("num_training_steps",)),
}
# Importing it takes seconds, of torchrl, that only the generators need; a test imports it.
SHIPPED_ENVIRONMENT = {"_component_": "grpo_components.rollout.environments.SingleTurnEnvironment"}
REWARD_CALL = dict.fromkeys(("prompt_text", "response_text", "answer", "finish_reason"))
KIND_WORDS = {int: "a whole number", float: "a number", bool: "true | false", str: "text"}
PACKAGES = {"TensorBoardLogger": "tensorboard", "WandBLogger": "wandb", "CometLogger": "comet_ml"}


def check(cfg: DictConfig) -> DictConfig:
    """Return a resolved copy of a config with every default filled in, or say why it cannot run.

    Quick checks come first: no file is looked at and nothing imported before all values fit their
    types and each other. The current folder joins `sys.path`, for components of the user's.

    Args:
        cfg (DictConfig): what torchtune's `config.parse` gives.

    Raises:
        ValueError: one line, "key: what is wrong; allowed: ...", for the first problem found.
    """
    try:
        given = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        _fail(error.full_key or "config", str(error).splitlines()[0], "a value that resolves")
    values = _read_section(SCHEMA, given, "")
    if values["generator"]["enforce_eager"] is None:
        values["generator"]["enforce_eager"] = values["device"] == "cpu"
    _check_values_together(values)
    if values["device"] == "cuda":
        _check_gpus(values)
    _check_files(values)
    _check_output_dir(values)
    _check_components(values)
    return OmegaConf.create(values)


def _fail(key: str, problem: str, allowed: str) -> NoReturn:
    raise ValueError(" ".join(f"{key}: {problem}; allowed: {allowed}".split()))


def _read_section(schema: Schema, given: Any, key: str) -> Any:
    is_node, prefix = "_component_" in schema, f"{key}." if key else ""
    if isinstance(given, dict) and given.get("_component_", "") is None:
        given = None  # what `lr_scheduler=null` on the command line comes to
    if given is None and schema is LR_SCHEDULER:
        return None
    if "*" in schema:
        if not isinstance(given, dict) or not given:
            _fail(key, f"{_shown(given)} given", "one `_component_` or more, each under a name")
        nodes = given.items()
        return {name: _read_section(schema["*"], node, f"{key}.{name}") for name, node in nodes}
    given = {} if given is None and not is_node else given
    if not isinstance(given, dict) or (is_node and "_component_" not in given):
        keys = "_component_ and its arguments" if is_node else ", ".join(schema)
        _fail(key, f"{_shown(given)} given", f"a mapping with {keys}")
    for name in given:
        if name not in schema and not is_node:
            _fail(f"{prefix}{name}", "unknown key", _nearest(str(name), schema, prefix))
    values = {}
    for name, rule in schema.items():
        if not isinstance(rule, Rule):
            values[name] = _read_section(rule, given.get(name), f"{prefix}{name}")
        elif name in given or rule.default is not ABSENT or not is_node:
            values[name] = _read_value(rule, given.get(name, rule.default), f"{prefix}{name}")
    return {**given, **values} if is_node else values


def _read_value(rule: Rule, given: Any, key: str) -> Any:
    if not _fits(rule, given):
        _fail(key, "missing" if given is ABSENT else f"{_shown(given)} given", _allowed(rule))
    return float(given) if rule.kind is float and given is not None else given


def _fits(rule: Rule, given: Any) -> bool:
    if given is None:
        return rule.null
    if rule.kind in (int, float):
        kinds = (int, float) if rule.kind is float else int
        is_number = isinstance(given, kinds) and not isinstance(given, bool)
        return is_number and rule.above < given < math.inf and rule.low <= given <= rule.high
    if rule.kind is list:
        return isinstance(given, list) and all(type(item) is int for item in given)
    return isinstance(given, rule.kind) and given in (rule.choices or (given,)) and given != ""


def _allowed(rule: Rule) -> str:
    words = " | ".join(_shown(choice).strip("'") for choice in rule.choices)
    if not rule.choices:
        limits = (("above", rule.above), ("at least", rule.low), ("at most", rule.high))
        bounds = [f"{word} {limit:.10g}" for word, limit in limits if math.isfinite(limit)]
        words = f"{KIND_WORDS.get(rule.kind, 'a list of token ids')} {' and '.join(bounds)}"
    return words + (" or null" if rule.null else "")


def _shown(value: Any) -> str:
    text = (
        str(value).lower() if isinstance(value, bool) else "null" if value is None else repr(value)
    )
    return text if len(text) <= 60 else f"{text[:57]}..."


def _nearest(name: str, keys: Mapping[str, Any] | list[str], prefix: str) -> str:
    """Name the key that was probably meant: of this section, else of any other."""
    if near := get_close_matches(name, keys, n=1, cutoff=0.75):
        return f"did you mean {prefix}{near[0]}?"
    sections = {key: rule for key, rule in SCHEMA.items() if isinstance(rule, Mapping)}
    anywhere = {leaf: f"{key}.{leaf}" for key, rule in sections.items() for leaf in rule}
    anywhere |= {key: key for key in SCHEMA}
    if near := get_close_matches(name, anywhere, n=1, cutoff=0.8):
        return f"did you mean {anywhere[near[0]]}?"
    return ", ".join(keys) or "none" if prefix else "the keys that `tune cat tiny_async_grpo` shows"


def _check_values_together(v: dict[str, Any]) -> None:
    push, most = v["push_every_n_steps"], v["max_staleness"] + 1
    if push > most:
        problem = f"{push} given: groups would wait for a push that waits for those groups"
        _fail("push_every_n_steps", problem, f"at most max_staleness + 1 = {most}")
    if v["loss"].get("kl_coeff", 0) > 0 and v["num_references"] == 0:
        problem = f"0 given with loss.kl_coeff: {v['loss']['kl_coeff']:g}"
        _fail("num_references", problem, "at least 1, or loss.kl_coeff: 0")
    samples = v["groups_per_step"] * v["group_size"]
    if v["num_trainers"] * v["updates_per_batch"] > samples:
        problem = f"{v['num_trainers']} given, and a step has {samples} samples"
        _fail("num_trainers", problem, f"num_trainers x updates_per_batch at most {samples}")
    prompt = v["dataset"].get("max_prompt_tokens") or 1
    longest = prompt + v["generator"]["max_response_tokens"]
    limits = {"tokens_per_micro_batch": v["tokens_per_micro_batch"]}
    limits["generator.max_model_len"] = v["generator"]["max_model_len"]
    for key, limit in limits.items():
        if limit is not None and limit < longest:
            problem = f"{limit} given, less than a prompt ({prompt}) and the longest response"
            _fail(key, problem, f"at least {longest}")
    marked = [name for name, node in v["rewards"].items() if node["is_success"]]
    if len(marked) != 1:
        problem = f"is_success: true on {' and '.join(marked) or 'none'}"
        _fail("rewards", problem, "exactly one reward with is_success: true")
    logger = v["metric_logger"]["_component_"].rpartition(".")[2]
    package = PACKAGES.get(logger, "torchtune")
    if find_spec(package) is None:
        problem = f"{logger} needs the package {package}, which is not installed"
        _fail("metric_logger", problem, f"another logger, or `pip install {package}` first")


def _check_gpus(v: dict[str, Any]) -> None:
    if not torch.cuda.is_available():
        _fail("device", f"cuda given, and PyTorch {torch.__version__} finds no GPU", "cpu")
    roles = ["generator", "trainer"] + ["reference"] * (v["loss"].get("kl_coeff", 0) > 0)
    shares = {role: v[f"gpus_per_{role}"] for role in roles}
    counts = {role: v[f"num_{role}s"] for role in roles}
    if counts["trainer"] > 1 and shares["trainer"] <= 0.5:
        problem = f"{shares['trainer']:g} given, and NCCL lets no two trainers share a GPU"
        _fail("gpus_per_trainer", problem, "above 0.5 (or num_trainers: 1)")
    memory = v["generator"]["gpu_memory_utilization"]
    if memory > shares["generator"]:
        problem = f"{memory:g} given, more than a generator's share of a GPU"
        _fail("generator.gpu_memory_utilization", problem, "at most gpus_per_generator")
    needed = [shares[role] for role in roles for _ in range(counts[role])]
    free = [1.0] * len(needed)  # of each GPU; as in Ray, no share is split over two GPUs
    for share in sorted(needed, reverse=True):
        free[next(i for i, left in enumerate(free) if left >= share - 1e-9)] -= share
    num_needed = sum(left < 1 for left in free)
    if num_needed > torch.cuda.device_count():
        problem = " and ".join(f"num_{role}s: {counts[role]}" for role in roles)
        problem += f" need {num_needed} GPUs, and there are {torch.cuda.device_count()}"
        _fail("num_generators", problem, "fewer roles, or gpus_per_<role> below 1")


def _check_files(v: dict[str, Any]) -> None:
    base, checkpointer, tokenizer = Path(v["base_model_path"]), v["checkpointer"], v["tokenizer"]
    if not base.is_dir():
        owner = "Qwen" if base.name.startswith("Qwen") else "<owner>"
        download = f"tune download {owner}/{base.name} --output-dir {base}"
        get_it = "python -m grpo_components.tiny_policy" if "tiny" in base.name else download
        _fail("base_model_path", f"no folder {base}", f"an existing one; `{get_it}` makes it")
    if Path(str(checkpointer.get("checkpoint_dir", base))).resolve() != base.resolve():
        problem = f"{checkpointer['checkpoint_dir']} given, and generators start elsewhere"
        _fail("checkpointer.checkpoint_dir", problem, str(base))
    names = checkpointer.get("checkpoint_files")
    if isinstance(names, dict):
        names = FormattedCheckpointFiles.from_dict(names).build_checkpoint_filenames()
    if not isinstance(names, list) or not names:
        _fail("checkpointer.checkpoint_files", f"{_shown(names)} given", "a list of file names")
    files = [("base_model_path", base / "config.json")]
    files += [("checkpointer.checkpoint_files", base / str(name)) for name in names]
    keys = [key for key in ("path", "merges_file", "special_tokens_path") if tokenizer.get(key)]
    files += [(f"tokenizer.{key}", Path(tokenizer[key])) for key in keys]
    for key in ("dataset", "eval_dataset"):
        source = v[key].get("source", "")
        if source.startswith(("/", ".")) or source.endswith((".jsonl", ".parquet")):
            files.append((f"{key}.source", Path(source)))
    for key, file in files:
        if not file.is_file():
            _fail(key, f"no file {file}", "an existing file")
    known = json.loads((base / "config.json").read_text()).get("max_position_embeddings")
    prompt = v["dataset"].get("max_prompt_tokens") or 1
    response = v["generator"]["max_response_tokens"]
    if known is not None and prompt + response > known:
        problem = f"{response} given, and the model knows {known} positions, prompt included"
        _fail("generator.max_response_tokens", problem, f"at most {known - prompt}")


def _check_output_dir(v: dict[str, Any]) -> None:
    output_dir = Path(v["output_dir"]).resolve()
    # A used output_dir is moved aside, with everything that lies in it.
    for inside in (Path(v["base_model_path"]), Path.cwd()):
        if inside.resolve().is_relative_to(output_dir):
            _fail("output_dir", f"{inside} lies in {output_dir}", "a folder for runs alone")
    if output_dir.is_relative_to(Path(v["base_model_path"]).resolve()):
        _fail("output_dir", f"{output_dir} lies in base_model_path", "a folder outside of it")
    nearest = next(folder for folder in (output_dir, *output_dir.parents) if folder.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        _fail("output_dir", f"{nearest} is not a folder to write to", "a writable place")


def _check_components(v: dict[str, Any]) -> None:
    if os.getcwd() not in sys.path:
        # At the end, as torchtune does: a datasets.py here must not hide the package of that name.
        sys.path.append(os.getcwd())
    for key, rule in SCHEMA.items():
        is_node = isinstance(rule, Mapping) and "_component_" in rule
        if is_node and v[key] not in (None, SHIPPED_ENVIRONMENT):
            _check_arguments(key, v[key], *ADDED.get(key, (0, ())))
    for name, node in v["rewards"].items():
        arguments = {key: node[key] for key in node if key not in REWARD_KEYS}
        reward = _check_arguments(f"rewards.{name}", arguments, 0, ())
        if not inspect.isclass(reward):
            continue  # of a function, nobody knows what it makes
        calls = [vars(base)["__call__"] for base in reward.__mro__ if "__call__" in vars(base)]
        try:
            inspect.signature(calls[0]).bind(None, **REWARD_CALL)
        except (IndexError, TypeError) as error:
            problem = f"objects of {node['_component_']} cannot be called: {error}"
            _fail(f"rewards.{name}", problem, f"a class called with {', '.join(REWARD_CALL)}")
        if node["_component_"].startswith("grpo_components."):
            config.instantiate(
                OmegaConf.create(arguments)
            )  # ours are quick to make, and say what is wrong


def _check_arguments(key: str, node: dict[str, Any], leading: int, by_name: tuple[str, ...]) -> Any:
    path = node["_component_"]
    try:
        component = _get_component_from_path(path)
    except Exception as error:  # the module may be the user's, and then it may raise anything
        cause = error.__cause__ or error
        place = traceback.extract_tb(cause.__traceback__)[-1]
        problem = f"{path} cannot be imported, {type(cause).__name__}: {cause}"
        if not any(name in place.filename for name in ("torchtune", "importlib")):
            problem += f" ({place.filename}:{place.lineno})"
        _fail(f"{key}._component_", problem, "a dotted path, installed or in the current folder")
    if not callable(component):
        _fail(f"{key}._component_", f"{path} cannot be called", "a class or function")
    parameters = list(inspect.signature(component).parameters.values())[leading:]
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    given = [name for name in node if name != "_component_"]
    if not any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters):
        for name in (name for name in given if name not in named):
            allowed = [*named, *REWARD_KEYS] if key.startswith("rewards.") else list(named)
            nearest = _nearest(name, allowed, f"{key}.")
            _fail(f"{key}.{name}", f"unknown argument of {path}", nearest)
    for name, parameter in named.items():
        if parameter.default is parameter.empty and name not in given and name not in by_name:
            _fail(f"{key}.{name}", "missing", f"the argument of {path}")
    return component
