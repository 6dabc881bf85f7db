"""Components of a config, built or tried out, with failures that name their key."""

from __future__ import annotations

import json
import netrc
import os
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch
from omegaconf import DictConfig, OmegaConf
from torchtune import config

from grpo_components.exchange.weights import (
    check_names_and_shapes,
    checkpoint_shapes,
    hf_converter,
)
from grpo_components.objective.schedules import Schedule, as_schedule
from grpo_components.running.partial_runs import RecordedPrompts


def build(key: str, node: DictConfig, *args: Any, **kwargs: Any) -> Any:
    """Instantiate a component of the config.

    Args:
        key: of the component, for the error.
        node: with `_component_` and its arguments.
        args: positional arguments before those of the node.
        kwargs: beside those of the node.

    Raises:
        ValueError: naming the key, whatever the component raised.
    """
    try:
        return config.instantiate(node, *args, **kwargs)
    except ValueError as error:
        text = str(error)
        if key == "eval_dataset" and text.startswith("dataset"):
            text = f"eval_{text}"  # both are built by one function
        raise ValueError(text if text.startswith(key) else f"{key}: {text}") from error
    except Exception as error:  # anything a component may raise on wrong arguments
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"{key}: {node._component_} cannot be built: {what}") from error


def build_data(cfg: DictConfig) -> tuple[Any, Any, Any]:
    """The tokenizer, the data set and the evaluation data set.

    Args:
        cfg: checked by preflight.

    Raises:
        ValueError: naming file, row and field of the first prompt that cannot be answered in the
            policy's context.
    """
    tokenizer = build("tokenizer", cfg.tokenizer)
    data = {key: build(key, cfg[key], tokenizer) for key in ("dataset", "eval_dataset")}
    if cfg.train_from:
        data["dataset"] = RecordedPrompts(cfg.train_from)
    response = cfg.generator.max_response_tokens
    hf_config = json.loads((Path(cfg.base_model_path) / "config.json").read_text())
    limits = {
        "generator.max_model_len": cfg.generator.max_model_len,
        "model.max_seq_len": cfg.model.get("max_seq_len"),
        "the model's max_position_embeddings": hf_config.get("max_position_embeddings"),
        "tokens_per_micro_batch": cfg.tokens_per_micro_batch,
    }
    name, most = min(((k, v) for k, v in limits.items() if v is not None), key=lambda item: item[1])
    for key, dataset in data.items():
        for prompt in map(dataset.__getitem__, range(len(dataset))):
            length = len(prompt["prompt_ids"])
            if 0 < length <= most - response:
                continue
            source = cfg[key].get("source", cfg[key]._component_)
            raise ValueError(
                f"{key} {source}, row {prompt['prompt_index'] + 1}, field question: the prompt "
                f"has {length} tokens; allowed: 1 to {most - response}, {name} less "
                f"generator.max_response_tokens"
            )
    return tokenizer, data["dataset"], data["eval_dataset"]


def split_learning_rate(node: DictConfig) -> tuple[DictConfig, Schedule | None]:
    """The optimizer's node with a number for `lr`, and the schedule that stood there, if any."""
    if OmegaConf.is_dict(node.get("lr")):
        schedule = as_schedule("optimizer.lr", node.lr)
        return OmegaConf.create({**node, "lr": schedule(0)}), schedule
    return node, None


def check_components(cfg: DictConfig) -> None:
    """Try what is otherwise built too late: in the trainer's process, or in a folder in use.

    Args:
        cfg: checked by preflight.

    Raises:
        ValueError: naming the key of an optimizer or scheduler that cannot be built, or of a model
            that is not the checkpoint's, or of a logger without a login.
    """
    _check_wandb_login(cfg.metric_logger)
    node, _ = split_learning_rate(cfg.optimizer)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = build("optimizer", node, [parameter])
    if not node._component_.startswith("torchao."):  # their step would be compiled here
        _check_step(node._component_, optimizer, parameter)
    if cfg.lr_scheduler:
        build("lr_scheduler", cfg.lr_scheduler, optimizer, num_training_steps=cfg.num_steps)
    with torch.device("meta"):
        model = build("model", cfg.model)
    base = Path(cfg.base_model_path)
    kind = cfg.checkpointer.model_type
    try:
        converted = hf_converter(kind, base)(model.state_dict())
    except ValueError:
        raise
    except Exception as error:  # whatever torchtune raises on another family's names
        what = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"checkpointer.model_type: {kind} given, and {cfg.model._component_} cannot be saved "
            f"so, {what}; allowed: the family of both model and {base / 'config.json'}"
        ) from error
    shapes = {name: tuple(tensor.shape) for name, tensor in converted.items()}
    try:
        check_names_and_shapes(shapes, checkpoint_shapes(base))
    except ValueError as error:
        problem = str(error).removeprefix("weights: ")
        raise ValueError(f"model: {problem}; allowed: the builder of {base}") from error


def _check_step(name: str, optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter) -> None:
    parameter.grad = torch.zeros_like(parameter)
    try:
        optimizer.step()
    except Exception as error:  # whatever an optimizer raises
        what = f"{name} cannot make the trainer's step, {type(error).__name__}: {error}"
        allowed = "one that takes dense gradients and no closure"
        raise ValueError(f"optimizer: {what}; allowed: {allowed}") from error


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
        raise ValueError(
            "metric_logger: Weights & Biases has no login here; allowed: `wandb login` first, or "
            "WANDB_API_KEY, or WANDB_MODE=offline in the environment"
        )
