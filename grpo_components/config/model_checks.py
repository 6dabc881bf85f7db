"""Refuses a `model` that differs from the base model, before anything starts."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from torch import nn
from torchtune.config._utils import _get_component_from_path

from grpo_components.errors import fail, shown
from grpo_components.training.model_match import (
    HF_MODEL_TYPES,
    Difference,
    differences,
    read_hf_config,
)


def check_model(node: DictConfig, model: nn.Module, model_type: str, base: Path) -> None:
    """Refuse a model that computes another policy than the base model, which generators run."""
    hf_config = read_hf_config(base)
    kinds = HF_MODEL_TYPES[model_type]
    if hf_config.model_type not in kinds:
        problem = f"{model_type} given, and {base} is a {hf_config.model_type} model"
        allowed = f"with {model_type}, a model_type in config.json of {' | '.join(kinds)}"
        fail("checkpointer.model_type", problem, allowed)
    try:
        found = list(differences(model, model_type, hf_config))
    except Exception as error:  # a user's module, or impossible values, may raise anything
        what = f"{type(error).__name__}: {error}"
        problem = f"{node._component_} cannot be compared with config.json of {base}, {what}"
        fail("model", problem, f"the builder of {base}")
    for difference in found:
        _refuse(node, difference, base)


def _refuse(node: DictConfig, difference: Difference, base: Path) -> None:
    name, found, expected = (
        difference.argument,
        _shown(difference.found),
        _shown(difference.expected),
    )
    theirs = f"config.json of {base} has {difference.key}: {expected}"
    if difference.key == "dropout":
        theirs = "generators have no dropout"
    if name in node:
        fail(f"model.{name}", f"{found} given, and {theirs}", expected)
    builder = node._component_
    if name in inspect.signature(_get_component_from_path(builder)).parameters:
        fail(f"model.{name}", f"not given, so it is {found}, and {theirs}", expected)
    allowed = f"the builder of {base}" if difference.can_match else "a model without it"
    fail("model", f"{builder} has {name}: {found}, and {theirs}", allowed)


def _shown(value: Any) -> str:
    return shown(value).strip("'")
