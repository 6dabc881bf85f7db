"""Builds the components of a config; a failure names the config key."""

from __future__ import annotations

import inspect
import json
import math
import netrc
import os
import re
import sys
from collections.abc import Iterator, Mapping
from numbers import Integral
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from torchtune import config
from torchtune.config._utils import _get_component_from_path

from grpo_components.config.column_checks import check_columns
from grpo_components.config.lora_checks import check_adapters
from grpo_components.data.datasets import PromptDataset
from grpo_components.data.prompt_mix import PromptMix, takes_tools
from grpo_components.data.tokenizers import hugging_face_tokenizer, num_ids
from grpo_components.errors import ConfigError, fail
from grpo_components.exchange.weights import (
    check_names_and_shapes,
    check_output_head,
    checkpoint_shapes,
    shapes_of,
)
from grpo_components.models.hf_weights import file_converter
from grpo_components.models.hugging_face_check import check_hugging_face
from grpo_components.models.hugging_face_policy import is_transformers
from grpo_components.models.tensor_parallel import transformers_plan
from grpo_components.objective.schedules import Schedule, as_schedule
from grpo_components.offline.partial_runs import RecordedPrompts
from grpo_components.setting_types import HUGGING_FACE
from grpo_components.settings import Settings

# Named, not imported: it needs torchrl, whose import takes seconds. A test checks that it exists.
SHIPPED_ENVIRONMENT = {"_component_": "grpo_components.rollout.environments.SingleTurnEnvironment"}

_ACCEPTED = "what the component accepts"
_KEY_FIRST = re.compile(r"([a-z_]\w*(?:\.[^\s:,]+)*(?:, [a-z_]\w*)*): |(dataset|ptx) ")
"""Matches the key, or names of arguments, with which the text of an error starts."""
_MAX_SCHEDULER_STEPS = 10_000
"""Maximum number of scheduler steps that are tried before the run; they take 0.2 s."""


def build(key: str, node: DictConfig, *args: Any, **kwargs: Any) -> Any:
    """Instantiate a component of the config."""
    try:
        return config.instantiate(node, *args, **kwargs)
    except ValueError as error:
        raise refused_by(key, node, error) from error
    except BaseException as error:  # a component may raise anything, even SystemExit
        if isinstance(error, KeyboardInterrupt):
            raise
        problem = f"{node._component_} cannot be built: {type(error).__name__}: {error}"
        raise ConfigError(key, problem, _ACCEPTED) from error


def refused_by(key: str, node: Mapping[Any, Any], error: ValueError) -> ConfigError:
    """Return what a component raised about its arguments, under the component's key."""
    if isinstance(error, ConfigError):
        where, problem, allowed = error.key, error.problem, error.allowed
    else:
        text, _, allowed = str(error).partition("; allowed: ")
        named = _KEY_FIRST.match(text)
        where = "" if named is None else named[1] or named[2]
        problem = text if named is None else text[named.end() :]
    if key == "eval_dataset":  # one function builds both data sets
        where, allowed = (re.sub(r"^dataset\b", key, text) for text in (where, allowed))
    if re.split("[,.]", where)[0] in node:
        where = f"{key}.{where}"
    elif where != key and not where.startswith(f"{key}."):
        where, problem = key, f"{where}: {problem}" if where else problem
    return ConfigError(where, problem, allowed or _ACCEPTED)


def build_data(cfg: Settings) -> tuple[Any, Any, Any]:
    """Build the tokenizer, the data set and the evaluation data set."""
    tokenizer = build("tokenizer", cfg.tokenizer)
    if not hasattr(tokenizer, "encode"):
        problem = f"{cfg.tokenizer._component_} returns an object without `encode`"
        fail("tokenizer", problem, "a tokenizer with the methods of torchtune's")
    tools = _tools_of(cfg.environment)
    keys = [key for key in ("dataset", "eval_dataset") if getattr(cfg, key) is not None]
    data = {key: _build_prompts(cfg, key, tokenizer, tools) for key in keys}
    for key, dataset in data.items():
        _check_rows(key, getattr(cfg, key)._component_, dataset)
        _check_types(key, getattr(cfg, key)._component_, dataset)
    hf_config = json.loads((Path(cfg.base_model_path) / "config.json").read_text())
    vocab_size = hf_config.get("vocab_size")
    of_transformers = cfg.model.get("_component_") == HUGGING_FACE
    trained = {
        "model.max_seq_len": cfg.model.get("max_seq_len"),
        "the model's max_position_embeddings": hf_config.get("max_position_embeddings"),
        # torchtune's attention has no window; longer sequences would differ from the generator's.
        "the model's sliding_window": None if of_transformers else _sliding_window(hf_config),
        "tokens_per_micro_batch": cfg.tokens_per_micro_batch,
    }
    name, most = _lowest(trained)
    if cfg.train_from:
        data["dataset"] = recorded = RecordedPrompts(cfg.train_from)
        known = [size for size in (vocab_size, sampled_ids(cfg, tokenizer)) if size is not None]
        recorded.check(most, name, min(known, default=None))
    longest = cfg.ptx and cfg.ptx.get("max_tokens")
    if isinstance(longest, int) and longest > most:
        raise ConfigError("ptx.max_tokens", f"{longest} given", f"at most {most}, {name}")
    limit = _lowest({"generator.max_model_len": cfg.generator.max_model_len, **trained})
    for key, dataset in data.items():
        if isinstance(dataset, PromptMix):
            nodes, parts = getattr(cfg, key).parts, dataset.parts
            for part in parts:
                where = f"{key}.parts.{part}"
                _check_prompts(cfg, where, nodes[part], parts[part].prompts, limit, vocab_size)
        elif not isinstance(dataset, RecordedPrompts):  # those were checked above
            _check_prompts(cfg, key, getattr(cfg, key), dataset, limit, vocab_size)
    check_columns(cfg, data)
    return tokenizer, data["dataset"], data.get("eval_dataset", PromptDataset([]))


def _sliding_window(raw: Mapping[str, Any]) -> int | None:
    """Return the base model's attention window in tokens; None without one.

    Missing keys of its config.json have transformers' defaults for the family.
    """
    if raw.get("model_type") == "qwen2" and not raw.get("use_sliding_window", False):
        return None
    window = raw.get("sliding_window", 4096 if raw.get("model_type") == "mistral" else None)
    return window or None  # vLLM reads 0 as no window


def _tools_of(environment: DictConfig) -> list[Any]:
    """Return the JSON schemas of the tools that the environment's world offers; may be empty."""
    world = environment.get("world")
    if not (isinstance(world, DictConfig) and "_component_" in world):
        return []
    return list(getattr(build("environment.world", world), "tool_schemas", ()))


def _build_prompts(cfg: Settings, key: str, tokenizer: Any, tools: list[Any]) -> Any:
    node = getattr(cfg, key)
    offered = {"tools": tools} if tools and takes_tools(node) else {}
    return build(key, node, tokenizer, **offered)


def _check_rows(key: str, component: str, dataset: Any) -> None:
    """Refuse a data set without the fields that the recipe reads."""
    fields = ("prompt_index", "prompt_ids", "prompt_text", "answer")
    try:
        rows = [[dataset[i][field] for field in fields] for i in range(len(dataset))]
        indices, _ = {index for index, *_ in rows}, dataset.max_prompt_length
    except (Exception, SystemExit) as error:  # a user's data set may raise anything
        problem = f"gives no prompts, {type(error).__name__}: {error}"
    else:
        if 0 < len(rows) == len(indices):
            return
        problem = "gives two rows with the same prompt_index" if rows else "gives no rows"
    allowed = f"rows by index, each with {', '.join(fields)}, and a max_prompt_length"
    raise ConfigError(key, f"{component} {problem}", allowed)


def _check_types(key: str, component: str, dataset: Any) -> None:
    """Refuse a data set whose first row has fields of wrong types."""
    row = dataset[0]
    ids = np.asarray(row["prompt_ids"])
    is_right = {
        "prompt_index": isinstance(row["prompt_index"], Integral),
        "prompt_ids": ids.ndim == 1 and (ids.dtype.kind in "iu" or not ids.size),
        "prompt_text": isinstance(row["prompt_text"], str),
    }
    for field, fits in is_right.items():
        if not fits:
            problem = f"{component} gives a {type(row[field]).__name__} as {field}"
            kinds = (
                "prompt_index a whole number, prompt_ids a list of whole numbers, prompt_text text"
            )
            raise ConfigError(key, problem, kinds)


def _check_prompts(
    cfg: Settings,
    key: str,
    node: DictConfig,
    prompts: Any,
    limit: tuple[str, int],
    vocab_size: int | None,
) -> None:
    """Refuse a prompt with unknown tokens, or without room for its response."""
    chat, styled = node.get("chat_template"), cfg.tokenizer.get("prompt_template") is not None
    if styled and node._component_.startswith("grpo_components.") and chat != "torchtune":
        problem = f"{chat or 'null'} given with tokenizer.prompt_template, which it ignores"
        allowed = "torchtune, or tokenizer.prompt_template: null"
        raise ConfigError(f"{key}.chat_template", problem, allowed)
    name, most = limit
    most -= cfg.generator.max_response_tokens
    for prompt in map(prompts.__getitem__, range(len(prompts))):
        ids = prompt["prompt_ids"]
        if not 0 < len(ids) <= most:
            problem = f"has {len(ids)} tokens"
            allowed = f"1 to {most}, {name} minus generator.max_response_tokens"
        elif vocab_size is not None and max(ids) >= vocab_size:
            problem = f"has the token {max(ids)}"
            allowed = f"below {vocab_size}, the vocab_size of base_model_path"
        else:
            continue
        where = f"{node.get('source', node._component_)}, row {prompt['prompt_index'] + 1}"
        raise ConfigError(key, f"{where}, field question: the prompt {problem}", allowed)


def shared_prompts(dataset: Any, held_out: Any) -> str:
    """Return one line with the number of prompts in both data sets; empty if there are none."""
    trained = {tuple(dataset[i]["prompt_ids"]) for i in range(len(dataset))}
    shared = sum(tuple(held_out[i]["prompt_ids"]) in trained for i in range(len(held_out)))
    note = f"eval_dataset: {shared} of its {len(held_out)} prompts are also trained on"
    return note if shared else ""


def _lowest(limits: Mapping[str, int | None]) -> tuple[str, int]:
    given = [(name, limit) for name, limit in limits.items() if limit is not None]
    return min(given, key=lambda item: item[1])


def parameters_of(component: Any) -> list[inspect.Parameter]:
    """Return the parameters of a class or function, even if a metaclass hides them (`EnvBase`)."""
    own_call = isinstance(component, type) and type(component).__call__ is not type.__call__
    if own_call and component.__init__ is not object.__init__:
        return list(inspect.signature(component.__init__).parameters.values())[1:]
    try:
        return list(inspect.signature(component).parameters.values())
    except ValueError:  # some builtins have no signature; building checks their arguments
        return [inspect.Parameter("anything", inspect.Parameter.VAR_KEYWORD)]


def build_environment(node: DictConfig, **offered: Any) -> Any:
    """Build the environment; called in a generator's process."""
    parameters = parameters_of(_get_component_from_path(node._component_))
    takes_any = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters)
    names = offered if takes_any else {parameter.name for parameter in parameters}
    parts = {key: config.instantiate(node[key]) for key in nested_components(node)}
    return config.instantiate(node, **{k: v for k, v in offered.items() if k in names}, **parts)


def nested_components(node: Mapping[str, Any]) -> list[str]:
    """Return the names of a component's arguments that are components themselves."""
    return [
        key
        for key, value in node.items()
        if isinstance(value, Mapping | DictConfig) and "_component_" in value
    ]


def sampled_ids(cfg: Settings, tokenizer: Any) -> int | None:
    """Return how many ids may be sampled, the first ones; None: the model's whole vocabulary."""
    stops = cfg.generator.stop_token_ids or getattr(tokenizer, "stop_tokens", ())
    if runs_agents(cfg.environment):  # they have the model's own
        tokenizer = hugging_face_tokenizer(cfg.base_model_path)
    return num_ids(tokenizer, stops)


def has_slots_apart(node: DictConfig) -> bool:
    """Whether the environment is built once per response instead of once per group."""
    if node == SHIPPED_ENVIRONMENT:
        return False
    return bool(getattr(_get_component_from_path(node._component_), "slots_apart", False))


def runs_agents(node: DictConfig) -> bool:
    """Whether the environment serves the policy to agents."""
    if node == SHIPPED_ENVIRONMENT:
        return False
    return bool(getattr(_get_component_from_path(node._component_), "runs_agents", False))


def split_learning_rate(node: DictConfig) -> tuple[DictConfig, Schedule | None]:
    """Replace a schedule at `lr` by its first number; return the node, and the schedule or None."""
    if OmegaConf.is_dict(node.get("lr")):
        schedule = as_schedule("optimizer.lr", node.lr)
        return OmegaConf.create({**node, "lr": schedule(0)}), schedule
    return node, None


def check_components(cfg: Settings) -> list[str]:
    """Build optimizer, scheduler and model once, before any process starts."""
    _check_wandb_login(cfg.metric_logger)
    node, schedule = split_learning_rate(cfg.optimizer)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = build("optimizer", node, [parameter])
    if not node._component_.startswith("torchao."):  # torchao would compile the step
        _check_step(node._component_, optimizer, parameter)
    doubts: list[str] = []
    if schedule is not None and schedule.warmup_steps > cfg.num_steps:
        longer = f"longer than the run of {cfg.num_steps} steps"
        doubts.append(
            f"warning: optimizer.lr: a warm-up of {schedule.warmup_steps} steps, {longer}"
        )
    if cfg.lr_scheduler:
        scheduler = build(
            "lr_scheduler", cfg.lr_scheduler, optimizer, num_training_steps=cfg.num_steps
        )
        rates = _rates(cfg.lr_scheduler._component_, scheduler, optimizer, cfg.num_steps)
        if len(rates) > cfg.num_steps:
            doubts += [f"warning: lr_scheduler: {each}" for each in _doubts_about_rates(rates)]
    with torch.device("meta"):
        model = build("model", cfg.model)
    base = Path(cfg.base_model_path)
    kind = cfg.model_type
    try:
        converted = file_converter(model, kind, base)(model.state_dict())
    except ValueError:
        raise
    except Exception as error:  # torchtune's converter fails on names of another family
        what = f"{type(error).__name__}: {error}"
        raise ConfigError(
            "checkpointer.model_type",
            f"{kind} given, and {cfg.model._component_} cannot be saved as such, {what}",
            f"the family of both model and {base / 'config.json'}",
        ) from error
    try:
        check_names_and_shapes(shapes_of(converted), checkpoint_shapes(base))
    except ValueError as error:
        problem = str(error).removeprefix("weights: ")
        raise ConfigError("model", problem, f"the builder of {base}") from error
    check_output_head(base)
    if is_transformers(model):
        if cfg.tensor_parallel_dim > 1:
            transformers_plan(model)
        prompt, response = cfg.dataset.get("max_prompt_tokens"), cfg.generator.max_response_tokens
        check_hugging_face(model, cfg.generator.max_model_len or (prompt or 0) + response)
    check_adapters(cfg, model)
    return doubts


def _check_step(name: str, optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter) -> None:
    parameter.grad = torch.zeros_like(parameter)
    try:
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()
        _ = optimizer.param_groups[0]["lr"], optimizer.state_dict()
    except (Exception, SystemExit) as error:  # a user's optimizer may raise anything
        what = f"{name} fails in a step, {type(error).__name__}: {error}"
        allowed = "one for dense gradients, without a closure"
        raise ConfigError("optimizer", what, allowed) from error


def _rates(name: str, scheduler: Any, optimizer: Any, num_steps: int) -> list[float]:
    """Return the learning rate of each step, and the one that would follow; of the first steps."""
    allowed = "a scheduler of torch.optim, whose rates are finite numbers >= 0"
    rates = [float(optimizer.param_groups[0]["lr"])]
    try:
        for _ in range(min(num_steps, _MAX_SCHEDULER_STEPS)):
            scheduler.step()
            rates.append(float(optimizer.param_groups[0]["lr"]))
            if not 0 <= rates[-1] < math.inf:
                raise ValueError(f"it sets the learning rate {rates[-1]}")
        scheduler.state_dict()
    except (Exception, SystemExit) as error:  # a user's scheduler may raise anything
        problem = f"{name} cannot be stepped, {type(error).__name__}: {error}"
        raise ConfigError("lr_scheduler", problem, allowed) from error
    return rates


def _doubts_about_rates(rates: list[float]) -> Iterator[str]:
    *of_steps, following = rates
    highest, run = max(of_steps), f"the run of {len(of_steps)} steps"
    if highest == 0:
        yield f"the learning rate is 0 in {run}, so nothing is learned"
    elif highest == of_steps[-1] < following:
        yield f"its warm-up is longer than {run}: the learning rate only reaches {highest:.3g}"


def _check_wandb_login(node: DictConfig) -> None:
    mode = node.get("mode") or os.environ.get("WANDB_MODE", "online")
    if not node._component_.endswith("WandBLogger") or mode in ("offline", "disabled"):
        return
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    try:
        known = host is not None and netrc.netrc().authenticators(host) is not None
    except (FileNotFoundError, netrc.NetrcParseError):
        known = False
    if not (known or os.environ.get("WANDB_API_KEY") or sys.stdin.isatty()):
        raise ConfigError(
            "metric_logger",
            "Weights & Biases has no login here",
            "`wandb login` first, or WANDB_API_KEY, or WANDB_MODE=offline in the environment",
        )
