"""Builds optimizer, scheduler and models once, on the meta device, and compares their weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn
from transformers import AutoTokenizer

from grpo_components.config.components import build
from grpo_components.config.files import longest_sequence
from grpo_components.errors import ConfigError, fail, shown
from grpo_components.exchange.weights import (
    check_names_and_shapes,
    check_output_head,
    checkpoint_shapes,
    shapes_of,
)
from grpo_components.models.hf_weights import file_converter
from grpo_components.models.hugging_face_check import check_hugging_face
from grpo_components.models.hugging_face_policy import hugging_face, is_transformers
from grpo_components.models.lora import (
    AdapterNames,
    adapted_layers,
    adapted_model,
    is_adapter,
    pushed_shapes,
)
from grpo_components.models.tensor_parallel import transformers_plan
from grpo_components.objective.component_errors import named_failure
from grpo_components.schedules import Schedule, as_schedule
from grpo_components.settings import Settings

_MAX_SCHEDULER_STEPS = 10_000
"""Maximum number of scheduler steps that are tried before the run; this many take 0.2 s."""


def split_learning_rate(node: DictConfig) -> tuple[DictConfig, Schedule | None]:
    """Replace a schedule at `lr` by its first value; return the node, and the schedule or None."""
    if OmegaConf.is_dict(node.get("lr")):
        schedule = as_schedule("optimizer.lr", node.lr)
        return OmegaConf.create({**node, "lr": schedule(0)}), schedule
    return node, None


def try_training(cfg: Settings) -> list[str]:
    """Build optimizer, scheduler and model once, before any process starts."""
    node, schedule = split_learning_rate(cfg.optimizer)
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = build("optimizer", node, [parameter])
    if not node._component_.startswith("torchao."):  # torchao would compile the step
        allowed = "one for dense gradients, without a closure"
        with named_failure("optimizer", node._component_, (Exception, SystemExit), allowed):
            optimizer.step()
    _try_policy(cfg)
    tried = min(cfg.num_steps, _MAX_SCHEDULER_STEPS)
    rates = [schedule(step) for step in range(tried + 1)] if schedule is not None else []
    if cfg.lr_scheduler:
        given = {"num_training_steps": cfg.num_steps}
        scheduler = build("lr_scheduler", cfg.lr_scheduler, optimizer, **given)
        rates = _rates(cfg.lr_scheduler._component_, scheduler, optimizer, tried)
    key = "lr_scheduler" if cfg.lr_scheduler else "optimizer.lr"
    doubts = _doubts_about_rates(rates) if tried == cfg.num_steps and rates else ()
    return [f"warning: {key}: {each}" for each in doubts]


def try_teacher(settings: Settings, path: str) -> None:
    """Refuse a teacher with another tokenizer, weights unlike its files', or wrong logprobs."""
    ours, theirs = (
        AutoTokenizer.from_pretrained(folder).get_vocab()
        for folder in (settings.base_model_path, path)
    )
    for token, number in sorted(ours.items(), key=lambda item: item[1]):
        if theirs.get(token) != number:
            problem = f"{path} has another tokenizer: token {shown(token)} is {number} of the "
            problem += f"policy, and {theirs.get(token, 'no id')} there"
            fail("teacher.path", problem, "one with the policy's tokens")
    try:
        with torch.device("meta"):
            model = hugging_face(path)
        named = file_converter(model, None, Path(path))(model.state_dict())
        check_names_and_shapes(checkpoint_shapes(Path(path)), shapes_of(named))
        check_hugging_face(model, longest_sequence(settings))
    except ConfigError as error:  # it names a key of the policy
        fail("teacher.path", f"{path}: {error.problem}", error.allowed)
    except ValueError as error:
        problem = str(error).removeprefix("weights: ")
        fail("teacher.path", f"{path}: {problem}", "weights of the config.json beside them")


def _try_policy(cfg: Settings) -> None:
    """Refuse a model whose weights do not match the checkpoint."""
    with torch.device("meta"):
        model = build("model", cfg.model)
    base, kind = Path(cfg.base_model_path), cfg.model_type
    try:
        converted = file_converter(model, kind, base)(model.state_dict())
    except ValueError:
        raise
    except Exception as error:  # torchtune's converter fails on names of another family
        what = f"{type(error).__name__}: {error}"
        problem = f"{kind} given, and {cfg.model._component_} cannot be saved as such, {what}"
        allowed = f"the family of both model and {base / 'config.json'}"
        raise ConfigError("checkpointer.model_type", problem, allowed) from error
    try:
        check_names_and_shapes(shapes_of(converted), checkpoint_shapes(base))
    except ValueError as error:
        problem = str(error).removeprefix("weights: ")
        raise ConfigError("model", problem, f"the builder of {base}") from error
    check_output_head(base)
    if is_transformers(model):
        if cfg.tensor_parallel_dim > 1:
            transformers_plan(model)
        check_hugging_face(model, cfg.generator.max_model_len or longest_sequence(cfg))
    check_adapters(cfg, model)


def check_adapters(settings: Settings, model: nn.Module) -> None:
    """Refuse adapters that trainer and generators would place in different layers."""
    lora = settings.lora
    if lora is None:
        return
    base = Path(settings.base_model_path)
    policy = adapted_model(lambda: model, lora, settings.dtype)
    if lacking := set(lora.target_modules) - (present := adapted_layers(policy)):
        problem = f"{', '.join(sorted(lacking))} given, of which `model` has no layer"
        fail("lora.target_modules", problem, ", ".join(sorted(present)) or "lora: null")
    state = policy.state_dict()
    named = AdapterNames(file_converter(model, settings.model_type, base))(
        {name: tensor for name, tensor in state.items() if is_adapter(name)}
    )
    try:
        check_names_and_shapes(shapes_of(named), pushed_shapes(base, lora))
    except ValueError as error:
        problem = str(error).removeprefix("weights: ")
        fail("lora.target_modules", problem, "layers of both `model` and base_model_path")


def _rates(name: str, scheduler: Any, optimizer: Any, num_steps: int) -> list[float]:
    """Return the learning rates of the first `num_steps` steps and of the step after them."""
    allowed = "a scheduler of torch.optim, whose rates are finite numbers >= 0"
    rates = [float(optimizer.param_groups[0]["lr"])]
    try:
        for _ in range(num_steps):
            scheduler.step()
            rates.append(float(optimizer.param_groups[0]["lr"]))
            if not 0 <= rates[-1] < math.inf:
                raise ValueError(f"it sets the learning rate {rates[-1]}")
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
