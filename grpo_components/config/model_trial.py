"""Tries optimizer, scheduler and models (on the meta device) before any process starts."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator, Iterator
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

from grpo_components.config.components import RAISES, build
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
    """Replace an `lr` that is a schedule by its first rate; return section, schedule or None."""
    if OmegaConf.is_dict(node.get("lr")):
        schedule = as_schedule("optimizer.lr", node.lr)
        return OmegaConf.create({**node, "lr": schedule(0)}), schedule
    return node, None


def try_training(cfg: Settings) -> list[str]:
    """Build optimizer, scheduler and model, and try steps; return warnings on learning rates."""
    node, schedule = split_learning_rate(cfg.optimizer)
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = build("optimizer", node, [parameter])
    if not node._component_.startswith("torchao."):  # torchao would compile the step
        allowed = "one for dense gradients, without a closure"
        with named_failure("optimizer", node._component_, RAISES, allowed):
            optimizer.step()
    _try_policy(cfg)
    tried = min(cfg.num_steps, _MAX_SCHEDULER_STEPS)
    rates = [schedule(step) for step in range(tried + 1)] if schedule is not None else []
    if cfg.lr_scheduler:
        given = {"num_training_steps": cfg.num_steps}
        scheduler = build("lr_scheduler", cfg.lr_scheduler, optimizer, **given)
        rates = [float(optimizer.param_groups[0]["lr"])]
        name = cfg.lr_scheduler._component_
        with named_failure("lr_scheduler", name, RAISES, "a scheduler of torch.optim"):
            for _ in range(tried):
                scheduler.step()
                rates.append(float(optimizer.param_groups[0]["lr"]))
        if wrong := [rate for rate in rates if not 0 <= rate < math.inf]:
            fail("lr_scheduler", f"{name} sets the learning rate {wrong[0]}", "finite rates >= 0")
    key = "lr_scheduler" if cfg.lr_scheduler else "optimizer.lr"
    doubts = _doubts_about_rates(rates) if tried == cfg.num_steps and rates else ()
    return [f"warning: {key}: {each}" for each in doubts]


def try_teacher(settings: Settings, path: str) -> None:
    """Refuse a teacher with another tokenizer than the policy, or wrong weights or logprobs."""
    from transformers import AutoTokenizer  # takes a second

    ours, theirs = (
        AutoTokenizer.from_pretrained(folder).get_vocab()
        for folder in (settings.base_model_path, path)
    )
    for token, number in sorted(ours.items(), key=lambda item: item[1]):
        if theirs.get(token) != number:
            problem = f"{path} has another tokenizer: token {shown(token)} is {number} of the "
            problem += f"policy, and {theirs.get(token, 'no id')} there"
            fail("teacher.path", problem, "one with the policy's tokens")
    allowed = "weights of the config.json beside them"
    with _refused("teacher.path", allowed, f"{path}: "):
        with torch.device("meta"):
            model = hugging_face(path)
        named = file_converter(model, None, Path(path))(model.state_dict())
        check_names_and_shapes(checkpoint_shapes(Path(path)), shapes_of(named))
        check_hugging_face(model, longest_sequence(settings))


@contextlib.contextmanager
def _refused(key: str, allowed: str, before: str = "") -> Generator[None]:
    """Turn a ValueError in the block into a ConfigError of `key`; `before` begins its `problem`."""
    try:
        yield
    except ValueError as error:
        problem = getattr(error, "problem", str(error)).removeprefix("weights: ")
        raise ConfigError(key, before + problem, getattr(error, "allowed", allowed)) from error


def _try_policy(cfg: Settings) -> None:
    """Refuse a model whose weight names or shapes do not match the checkpoint."""
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
    with _refused("model", f"the builder of {base}"):
        check_names_and_shapes(shapes_of(converted), checkpoint_shapes(base))
    check_output_head(base)
    if is_transformers(model):
        if cfg.tensor_parallel_dim > 1:
            transformers_plan(model)
        check_hugging_face(model, cfg.generator.max_model_len or longest_sequence(cfg))
    check_adapters(cfg, model)


def check_adapters(settings: Settings, model: nn.Module) -> None:
    """Refuse LoRA adapters that trainer and generators would place in different layers."""
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
    with _refused("lora.target_modules", "layers of both `model` and base_model_path"):
        check_names_and_shapes(shapes_of(named), pushed_shapes(base, lora))


def _doubts_about_rates(rates: list[float]) -> Iterator[str]:
    *of_steps, following = rates
    highest, run = max(of_steps), f"the run of {len(of_steps)} steps"
    if highest == 0:
        yield f"the learning rate is 0 in {run}, so nothing is learned"
    elif highest == of_steps[-1] < following:
        yield f"its warm-up is longer than {run}: the learning rate only reaches {highest:.3g}"
