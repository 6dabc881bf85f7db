"""Checks a config before anything starts: what cannot run ends here, in one line naming the key."""

from __future__ import annotations

import inspect
import os
import re
import sys
import traceback
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torchtune import config
from torchtune.config._utils import _get_component_from_path

from grpo_components.config.argument_types import check_types
from grpo_components.config.bounds import check_against_model, check_bounds
from grpo_components.config.building import (
    SHIPPED_ENVIRONMENT,
    build,
    nested_components,
    parameters_of,
)
from grpo_components.config.checkpointer_checks import checkpoint_files
from grpo_components.config.moved import moved_to
from grpo_components.config.output_checks import check_folder, check_inputs
from grpo_components.config.paths import expand_paths, read_hf_config
from grpo_components.config.prompt_match import check_same_prompts
from grpo_components.config.replay_check import check_replay
from grpo_components.config.schema import (
    MODEL_TYPES,
    PENALTIES,
    REFUSED_MODEL_TYPES,
    REWARD_KEYS,
    SCHEMA,
    TRUNCATION,
    bending,
    nearest,
    read_section,
)
from grpo_components.config.training_checks import check_heads, check_training, default_bound
from grpo_components.config_text import MAX_DEPTH, check_values
from grpo_components.errors import fail, shown
from grpo_components.evaluation.metrics import check_keep_best
from grpo_components.exchange.staleness import StalenessContract
from grpo_components.objective.schedules import as_schedule
from grpo_components.offline.partial_runs import check_partial_run
from grpo_components.quiet import quiet_libraries
from grpo_components.records.resume import KL_SECTIONS, check_resume

# What the recipe adds to a component's arguments: how many leading ones, and which by name.
ADDED: dict[str, tuple[int, tuple[str, ...]]] = {
    "dataset": (1, ()),
    "eval_dataset": (1, ()),
    "environment": (0, ("num_slots", "decode", "encode", "score", "max_response_tokens")),
    "optimizer": (1, ()),
    "ptx": (1, ()),
    "lr_scheduler": (1, ("num_training_steps",)),
}
REWARD_CALL = ("prompt_text", "response_text", "answer", "finish_reason")
_HUB_NAME = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?", re.ASCII)
# Of local data sets. rollout/data_rows.py has their readers; importing it takes seconds.
SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")
PACKAGES = {"TensorBoardLogger": "tensorboard", "WandBLogger": "wandb", "CometLogger": "comet_ml"}


def read_config(cfg: DictConfig) -> DictConfig:
    """Check a config and fill in its defaults; from here on it is the one that runs.

    Args:
        cfg: what torchtune's `config.parse` gives.

    Raises:
        ValueError: one line, "key: what is wrong; allowed: ...", for the first problem found.
    """
    cfg = check(cfg)
    quiet_libraries(cfg.log_level)
    return cfg


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
        check_values(OmegaConf.to_container(cfg, resolve=False))
        given = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        allowed = "a value of its own, or ${key} of a key that the config has"
        fail(error.full_key or "config", str(error).splitlines()[0], allowed)
    except RecursionError:
        fail("config", "nested too deeply to be read", f"at most {MAX_DEPTH} levels")
    values = expand_paths(read_section(SCHEMA, given, ""))
    check_bounds(values)
    if values["generator"]["enforce_eager"] is None:
        values["generator"]["enforce_eager"] = values["device"] == "cpu"
    if values["max_generator_kl"] is None:
        values["max_generator_kl"] = default_bound(values)
    if values["profiler"]["enabled"]:
        own = {"output_dir": f"{values['output_dir']}/profile", "xpu": False}
        own["cuda"] = values["device"] == "cuda"
        values["profiler"] = own | values["profiler"]
    _check_values_together(values)
    if values["device"] == "cuda":
        _check_gpus(values)
    _check_files(values)
    check_inputs(values)
    check_folder(values)
    check_resume(values, needs_reference)
    check_replay(values)
    check_partial_run(values)
    _check_components(values)
    check_same_prompts(values)
    return OmegaConf.create(values)


def _check_values_together(v: dict[str, Any]) -> None:
    contract = StalenessContract(v["max_staleness"], v["groups_per_step"])
    push, most = v["push_every_n_steps"], contract.max_push_interval
    if push > most:
        problem = f"{push} given: groups would wait for a push that waits for those groups"
        fail("push_every_n_steps", problem, f"at most max_staleness + 1 = {most}")
    if (v["min_generators"] or 1) > v["num_generators"]:
        problem = f"{v['min_generators']} given with num_generators: {v['num_generators']}"
        fail("min_generators", problem, "at most num_generators, or null for all of them")
    as_schedule("advantages.kl_coeff", v["advantages"].get("kl_coeff", 0))
    for section in KL_SECTIONS:
        if needs_reference(v[section]) and v["num_references"] == 0:
            problem = f"0 given with {section}.kl_coeff: {shown(v[section]['kl_coeff'])}"
            fail("num_references", problem, f"at least 1, or {section}.kl_coeff: 0")
    if isinstance(v["optimizer"].get("lr"), dict) and v["lr_scheduler"]:
        fail("lr_scheduler", "given beside a schedule for optimizer.lr", "null, or a number there")
    if v["log_token_logprobs"] and v["rollouts_logged_per_step"] == 0:
        problem = "true given with rollouts_logged_per_step: 0, so that no rollout is logged"
        fail("log_token_logprobs", problem, "false, or rollouts_logged_per_step: 1 or more")
    if v["reward_shaping"]["overlong_tokens"] > v["generator"]["max_response_tokens"]:
        problem = f"{v['reward_shaping']['overlong_tokens']} given"
        fail("reward_shaping.overlong_tokens", problem, "at most generator.max_response_tokens")
    correction = v["off_policy"]["_component_"].rpartition(".")[2]
    weighs = correction in ("TokenTIS", "SequenceTIS", "MaskedIS")
    if weighs and v["loss"].get("_component_", "").endswith(".DecoupledPPOLoss"):
        problem = f"{v['off_policy']['_component_']} given, and DecoupledPPOLoss weighs by itself"
        fail("off_policy", problem, "NoCorrection, GeometricMask or OffPolicySequenceMask")
    turns, most = v["environment"].get("max_turns"), v["generator"]["max_response_tokens"]
    if turns is not None and turns > most:
        problem = f"{turns} given, and a turn takes a token or more of a response"
        fail("environment.max_turns", problem, f"at most generator.max_response_tokens = {most}")
    _check_sampler(v["generator"])
    if v["packing"] and v["device"] == "cpu":
        problem = "true given with device: cpu, where flex attention has no backward"
        fail("packing", problem, "false, or device: cuda")
    check_training(v)
    check_keep_best(v)
    memory = psutil.virtual_memory().total
    if (v["object_store_memory"] or 0) > memory:
        problem = f"{v['object_store_memory']} given, more than the memory of this machine"
        fail("object_store_memory", problem, f"at most {memory}")
    prompt = v["dataset"].get("max_prompt_tokens") or 1
    longest = prompt + v["generator"]["max_response_tokens"]
    limits = {"tokens_per_micro_batch": v["tokens_per_micro_batch"]}
    limits["generator.max_model_len"] = v["generator"]["max_model_len"]
    for key, limit in limits.items():
        if limit is not None and limit < longest:
            problem = f"{limit} given, less than a prompt ({prompt}) and the longest response"
            fail(key, problem, f"at least {longest}")
    if v["reward_model"]["path"] is not None and "reward_model" in v["rewards"]:
        problem = "given beside reward_model.path, whose scores have this name"
        fail("rewards.reward_model", problem, "another name")
    marked = [name for name, node in v["rewards"].items() if node["is_success"]]
    if len(marked) != 1:
        problem = f"is_success: true on {' and '.join(marked) or 'none'}"
        fail("rewards", problem, "exactly one reward with is_success: true")
    logger = v["metric_logger"]["_component_"].rpartition(".")[2]
    package = PACKAGES.get(logger, "torchtune")
    if find_spec(package) is None:
        problem = f"{logger} needs the package {package}, which is not installed"
        fail("metric_logger", problem, f"another logger, or `pip install {package}` first")


def _check_sampler(generator: dict[str, Any]) -> None:
    for name in bending(generator):
        given = generator[name]
        if not generator["allow_biased_sampling"]:
            problem = f"{given:g} given: tokens would come from another distribution than the one "
            problem += "the trainer computes, so that every ratio would be wrong"
            allowed = f"{TRUNCATION[name]:g}, or generator.allow_biased_sampling: true"
            fail(f"generator.{name}", problem, allowed)


def needs_reference(section: Mapping[str, Any]) -> bool:
    """Whether a section's `kl_coeff`, a number or a schedule, is ever above 0."""
    return as_schedule("kl_coeff", section.get("kl_coeff", 0)).highest > 0


def _check_gpus(v: dict[str, Any]) -> None:
    if not torch.cuda.is_available():
        fail("device", f"cuda given, and PyTorch {torch.__version__} finds no GPU", "cpu")
    roles = ["generator", "trainer"] + ["reference"] * any(
        needs_reference(v[section]) for section in KL_SECTIONS
    )
    roles += ["reward_model"] * (v["reward_model"]["path"] is not None)
    shares = {role: v[f"gpus_per_{role}"] for role in roles}
    absent = {"trainer": v["eval_only"] or v["rollout_only"], "generator": v["train_from"]}
    counts = {role: 0 if absent.get(role) else v.get(f"num_{role}s", 1) for role in roles}
    if counts["trainer"] > 1 and shares["trainer"] <= 0.5:
        problem = f"{shares['trainer']:g} given, and NCCL lets no two trainers share a GPU"
        fail("gpus_per_trainer", problem, "above 0.5 (or num_trainers: 1)")
    memory = v["generator"]["gpu_memory_utilization"]
    if memory > shares["generator"]:
        problem = f"{memory:g} given, more than a generator's share of a GPU"
        fail("generator.gpu_memory_utilization", problem, "at most gpus_per_generator")
    needed = [shares[role] for role in roles for _ in range(counts[role])]
    free = [1.0] * len(needed)  # of each GPU; as in Ray, no share is split over two GPUs
    for share in sorted(needed, reverse=True):
        free[next(i for i, left in enumerate(free) if left >= share - 1e-9)] -= share
    num_needed = sum(left < 1 for left in free)
    if num_needed > torch.cuda.device_count():
        problem = " and ".join(f"num_{role}s: {counts[role]}" for role in roles)
        problem += f" need {num_needed} GPUs, and there are {torch.cuda.device_count()}"
        fail("num_generators", problem, "fewer roles, or gpus_per_<role> below 1")


def _check_files(v: dict[str, Any]) -> None:
    base, checkpointer, tokenizer = Path(v["base_model_path"]), v["checkpointer"], v["tokenizer"]
    if not base.is_dir():
        owner = "Qwen" if base.name.startswith("Qwen") else "<owner>"
        download = f"tune download {owner}/{base.name} --output-dir {base}"
        get_it = (
            "python -m grpo_components.examples.tiny_policy" if "tiny" in base.name else download
        )
        fail("base_model_path", f"no folder {base}", f"an existing one; `{get_it}` makes it")
    if Path(str(checkpointer.get("checkpoint_dir", base))).resolve() != base.resolve():
        problem = f"{checkpointer['checkpoint_dir']} given, and generators start elsewhere"
        fail("checkpointer.checkpoint_dir", problem, str(base))
    files = [("base_model_path", base / "config.json")]
    named = checkpoint_files(checkpointer, base, v["output_dir"])
    files += [("checkpointer.checkpoint_files", file) for file in named]
    keys = [key for key in ("path", "merges_file", "special_tokens_path") if tokenizer.get(key)]
    files += [(f"tokenizer.{key}", Path(tokenizer[key])) for key in keys]
    for key in ("dataset", "eval_dataset"):
        source = v[key].get("source")
        if source is None:  # a mix, or a data set of the user's
            continue
        path = Path(source)
        if source.startswith(("/", ".")) or path.suffix in SUFFIXES or path.exists():
            files.append((f"{key}.source", path))
            if path.is_dir() or (path.exists() and path.suffix not in SUFFIXES):
                problem = f"{source} is a {'folder' if path.is_dir() else 'file of another kind'}"
                fail(f"{key}.source", problem, f"a {' or '.join(SUFFIXES)} file, or a hub name")
    for key, file in files:
        if not file.is_file():
            fail(key, f"no file {file}", "an existing file")
    _check_reward_model(v["reward_model"]["path"])
    hf_config = read_hf_config("base_model_path", base)
    check_against_model(v, hf_config)
    kind = {"gemma2": "GEMMA2"}.get(str(hf_config.get("model_type")))
    if "vision_config" in hf_config or "audio_config" in hf_config:
        kind = "LLAMA3_VISION"  # or another multimodal one, for the same reason
    if kind is not None:
        problem = f"{base} is a {hf_config.get('model_type')} model; {REFUSED_MODEL_TYPES[kind]}"
        fail("base_model_path", problem, f"a model of {', '.join(MODEL_TYPES)}")
    check_heads(v["tensor_parallel_dim"], hf_config)
    known = hf_config.get("max_position_embeddings")
    if known is not None and v["packing"] and v["tokens_per_micro_batch"] > known // 128 * 128:
        problem = f"{v['tokens_per_micro_batch']} given with packing: true, for rows of that many"
        fail("tokens_per_micro_batch", problem, f"at most the model's {known // 128 * 128}")
    prompt = v["dataset"].get("max_prompt_tokens") or 1
    response = v["generator"]["max_response_tokens"]
    if known is not None and prompt + response > known:
        problem = f"{response} given, and the model knows {known} positions, prompt included"
        fail("generator.max_response_tokens", problem, f"at most {known - prompt}")


def _check_reward_model(path: str | None) -> None:
    if path is None or not (path.startswith(("/", ".")) or Path(path).exists()):
        if path is not None and not _HUB_NAME.fullmatch(path):
            fail("reward_model.path", f"no folder {path}", "a model's folder, or a hub name")
        return
    if not (Path(path) / "config.json").is_file():
        fail("reward_model.path", f"no file {path}/config.json", "a model's folder, or a hub name")
    kinds = read_hf_config("reward_model.path", Path(path)).get("architectures")
    kind = kinds[0] if isinstance(kinds, list) and kinds else "nothing"
    if not str(kind).endswith("ForSequenceClassification"):
        fail("reward_model.path", f"{path} has a {kind}", "a model ForSequenceClassification")


def _check_components(v: dict[str, Any]) -> None:
    if os.getcwd() not in sys.path:
        # At the end, as torchtune does: a datasets.py here must not hide the package of that name.
        sys.path.append(os.getcwd())
    for key, value in v.items():
        is_node = isinstance(value, Mapping) and "_component_" in value and key != "user"
        if is_node and value != SHIPPED_ENVIRONMENT:
            node = {name: value[name] for name in value if key != "loss" or name not in PENALTIES}
            _check_arguments(key, node, *ADDED.get(key, (0, ())))
    for name in nested_components(v["environment"]):
        part = v["environment"][name]
        _check_arguments(f"environment.{name}", part, 0, ())
        if part["_component_"].startswith("grpo_components."):
            build(f"environment.{name}", OmegaConf.create(part))
    if v["environment"]["_component_"].endswith(".MultiTurnEnvironment"):
        _check_world(v["environment"])
    for name, node in v["rewards"].items():
        arguments = {key: node[key] for key in node if key not in REWARD_KEYS}
        reward = _check_arguments(f"rewards.{name}", arguments, 0, ())
        _check_call(f"rewards.{name}", reward, REWARD_CALL, by_name=True)
        if not inspect.isclass(reward):
            continue
        if node["_component_"].startswith("grpo_components."):
            # Ours are quick to make, and say what is wrong.
            try:
                made = config.instantiate(OmegaConf.create(arguments))
            except ValueError as error:
                separator = "." if re.split("[,:]", str(error))[0] in arguments else ": "
                raise ValueError(f"rewards.{name}{separator}{error}") from error
            limit_s = v["timeouts"]["reward_s"]
            if getattr(made, "wall_s", 0) >= limit_s:  # slow programs would be failed samples
                problem = f"{made.wall_s:g} given with timeouts.reward_s: {limit_s:g}"
                fail(f"rewards.{name}.wall_s", problem, "a number below timeouts.reward_s")


def _check_world(environment: dict[str, Any]) -> None:
    world = environment["world"]
    if "world" not in nested_components(environment):
        fail("environment.world", f"{shown(world)} given", "`_component_` and its arguments")
    component = _get_component_from_path(world["_component_"])
    _check_call("environment.world", component, ("prompt", "seed"), by_name=False)


def _check_call(key: str, component: Any, arguments: Sequence[str], *, by_name: bool) -> None:
    """Refuse a class whose objects cannot be called so."""
    if not inspect.isclass(component):
        return  # of a function, nobody knows what it makes
    calls = [vars(base)["__call__"] for base in component.__mro__ if "__call__" in vars(base)]
    places, names = ((), dict.fromkeys(arguments)) if by_name else (arguments, {})
    try:
        inspect.signature(calls[0]).bind(None, *places, **names)
    except (IndexError, TypeError) as error:
        path = f"{component.__module__}.{component.__qualname__}"
        problem = f"objects of {path} cannot be called: {error}"
        fail(key, problem, f"a class called with {', '.join(arguments)}")


def _check_arguments(key: str, node: dict[str, Any], leading: int, by_name: tuple[str, ...]) -> Any:
    path = node["_component_"]
    if moved := moved_to(path):
        fail(f"{key}._component_", f"{path} has moved", moved)
    try:
        component = _get_component_from_path(path)
    except BaseException as error:  # the module may be the user's, and then it may raise anything
        if isinstance(error, KeyboardInterrupt):
            raise
        cause = error.__cause__ or error
        place = traceback.extract_tb(cause.__traceback__)[-1]
        problem = f"{path} cannot be imported, {type(cause).__name__}: {cause}"
        if not any(name in place.filename for name in ("torchtune", "importlib")):
            problem += f" ({place.filename}:{place.lineno})"
        fail(f"{key}._component_", problem, "a dotted path, installed or in the current folder")
    if not callable(component):
        fail(f"{key}._component_", f"{path} cannot be called", "a class or function")
    parameters = parameters_of(component)[leading:]
    if key == "loss" and (own := [p.name for p in parameters if p.name in PENALTIES]):
        problem = f"an argument of {path}, and the recipe adds this term to every loss"
        fail(f"loss.{own[0]}", problem, "a loss without this argument")
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    given = [name for name in node if name != "_component_"]
    if not any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters):
        for name in (name for name in given if name not in named):
            beside = (
                REWARD_KEYS if key.startswith("rewards.") else PENALTIES if key == "loss" else ()
            )
            allowed = [*named, *beside]
            meant = nearest(name, allowed, f"{key}.")
            fail(f"{key}.{name}", f"unknown argument of {path}", meant)
    for name in given:
        if name in by_name:
            fail(f"{key}.{name}", "given, and the recipe sets it", "without it")
    for name, parameter in named.items():
        if parameter.default is parameter.empty and name not in given and name not in by_name:
            if key.startswith("rewards.") and name in REWARD_CALL:
                allowed = "a class whose objects do, or a function that makes one"
                fail(f"{key}._component_", f"{path} itself takes a sample", allowed)
            fail(f"{key}.{name}", "missing", f"the argument of {path}")
    if not (key.startswith("rewards.") and path.startswith("grpo_components.")):
        check_types(key, component, node)  # those of ours are built next, and say more
    return component
