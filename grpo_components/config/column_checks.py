"""Checks that the data sets have the columns that the rewards take by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torchtune.config._utils import _get_component_from_path

from grpo_components.data.columns import CALL, OF_AGENTS, other_columns
from grpo_components.errors import fail
from grpo_components.settings import Settings

_MAX_SHOWN = 10
"""Number of columns that an error lists."""


def call_of(component: type) -> Any:
    """Return the function that calls of a class's objects run; None if they cannot be called."""
    calls = [vars(base)["__call__"] for base in component.__mro__ if "__call__" in vars(base)]
    return calls[0] if calls else None


def columns_taken(component: Any) -> list[str]:
    """Return the columns that objects of a reward's class must get; none for a function."""
    call = call_of(component) if inspect.isclass(component) else None
    if call is None:
        return []
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = list(inspect.signature(call).parameters.values())[1:]  # without self
    required = [p.name for p in parameters if p.kind in named and p.default is p.empty]
    return [name for name in required if name not in CALL]


def check_columns(cfg: Settings, data: Mapping[str, Any]) -> None:
    """Refuse a reward that takes a column by name which a row of a data set lacks."""
    used = {
        key: dataset
        for key, dataset in data.items()
        if not (cfg.train_from or (cfg.eval_only and key == "dataset"))
    }
    for name, node in cfg.rewards.items():
        taken = columns_taken(_get_component_from_path(node._component_))
        if set(taken) & set(OF_AGENTS) and _has_agents(cfg):
            taken = [column for column in taken if column not in OF_AGENTS]
        for key, dataset in used.items() if taken else ():
            for row in range(len(dataset)):
                columns = other_columns(dataset[row])
                if lacking := [column for column in taken if column not in columns]:
                    index = dataset[row]["prompt_index"] + 1
                    problem = f"{node._component_} takes {lacking[0]}, which row {index} of {key}"
                    has = ", ".join(list(columns)[:_MAX_SHOWN]) or "none"
                    fail(f"rewards.{name}", f"{problem} lacks", f"its other columns: {has}")


def _has_agents(cfg: Settings) -> bool:
    environment = _get_component_from_path(cfg.environment._component_)
    return bool(getattr(environment, "runs_agents", False))
