"""Combines several prompt data sets into one, each with its share of the training prompts."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from omegaconf import OmegaConf
from torch.utils.data import Dataset
from torchtune import config
from torchtune.config._utils import _get_component_from_path

from grpo_components.data.columns import filled
from grpo_components.errors import ConfigError
from grpo_components.trajectory import Prompt


@dataclass(frozen=True)
class MixedPart:
    """One data set of a mix, with its sampling weight."""

    prompts: Any
    weight: float
    rows: Any
    """The same prompts, but with a prompt_index that is unique in the whole mix."""


class PromptMix(Dataset[Prompt]):
    """Concatenated prompt data sets, from which `PromptStream` draws by weight."""

    def __init__(self, parts: Mapping[str, tuple[Any, float]]) -> None:
        rows: list[Prompt] = []
        first, ends = 0, [0]
        for prompts, _ in parts.values():
            own = [prompts[row] for row in range(len(prompts))]
            rows += [{**row, "prompt_index": first + row["prompt_index"]} for row in own]
            first += 1 + max(row["prompt_index"] for row in own)
            ends.append(len(rows))
        self._rows = filled(rows)
        extents = zip(parts.items(), pairwise(ends), strict=True)
        self.parts = {
            name: MixedPart(prompts, weight, self._rows[begin:end])
            for (name, (prompts, weight)), (begin, end) in extents
        }
        self.max_prompt_length = max(prompts.max_prompt_length for prompts, _ in parts.values())
        """Length of the longest prompt, in tokens."""
        notes = [getattr(prompts, "note", "") for prompts, _ in parts.values()]
        self.note = "\n".join(filter(None, notes))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Prompt:
        return self._rows[index]


def takes_tools(node: Mapping[str, Any]) -> bool:
    """Whether a data set's component takes `tools`, and its config section does not set them."""
    try:
        parameters = inspect.signature(_get_component_from_path(node["_component_"])).parameters
    except (ValueError, TypeError):  # some builtins have no signature
        return False
    return "tools" in parameters and "tools" not in node


def mixed_dataset(
    tokenizer: Any,
    *,
    parts: Mapping[str, Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
) -> PromptMix:
    """Combine prompt data sets into one, from which prompts are drawn by weight.

    Args:
        tokenizer: torchtune's tokenizer.
        parts: for each name, the `_component_` of a data set with its arguments, and a `weight`
            (default 1): its share of the prompts, relative to the weights of the other parts.
        tools: JSON schemas of the tools that the policy may call; given to parts that take them.

    Raises:
        ValueError: a part cannot be built; the message names it.
    """
    if not isinstance(parts, Mapping) or not parts:
        raise ConfigError("dataset.parts", f"{parts} given", "a `_component_` for each name")
    built: dict[str, tuple[Any, float]] = {}
    for name, node in parts.items():
        key = f"dataset.parts.{name}"
        if not isinstance(node, Mapping) or "_component_" not in node:
            raise ConfigError(key, f"{node} given", "_component_, its arguments and weight")
        weight = node.get("weight", 1.0)
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            weight = math.nan
        if not 0 < weight < math.inf:
            raise ConfigError(f"{key}.weight", f"{node['weight']} given", "a number above 0")
        arguments = {argument: node[argument] for argument in node if argument != "weight"}
        try:
            offered = {"tools": tools} if takes_tools(node) and tools else {}
            prompts = config.instantiate(OmegaConf.create(arguments), tokenizer, **offered)
            if isinstance(prompts, PromptMix):
                raise ValueError("is a mix itself; allowed: single data sets")
            max(prompts[row]["prompt_index"] for row in range(len(prompts)))  # raises without rows
        except ValueError as error:
            text = str(error).replace("allowed: dataset.", f"allowed: {key}.")
            own = text.removeprefix("dataset.")
            raise ValueError(f"{key}.{own}" if own != text else f"{key}: {text}") from error
        except Exception as error:  # a component may raise anything on wrong arguments
            what = f"{node['_component_']} cannot be built: {type(error).__name__}: {error}"
            raise ValueError(f"{key}: {what}") from error
        built[name] = prompts, weight
    return PromptMix(built)
