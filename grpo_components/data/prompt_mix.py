"""Combines several prompt data sets into one, each with its share of the training prompts."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf
from torch.utils.data import Dataset
from torchtune import config
from torchtune.config._utils import _get_component_from_path

from grpo_components.data.columns import other_columns
from grpo_components.errors import ConfigError

Prompt = dict[str, Any]


class MixedPart(Dataset[Prompt]):
    """One data set of a mix; its prompt_index values follow those of the parts before it."""

    def __init__(self, prompts: Any, weight: float, first_index: int) -> None:
        self.prompts, self.weight, self.first_index = prompts, weight, first_index
        self.columns: dict[str, None] = {}
        """Columns of the whole mix: those that a row lacks are None."""

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> Prompt:
        prompt = self.prompts[index]
        index = self.first_index + prompt["prompt_index"]
        return {**self.columns, **prompt, "prompt_index": index}


class PromptMix(Dataset[Prompt]):
    """Prompt data sets one after the other, from which `PromptStream` draws by weight."""

    def __init__(self, parts: Mapping[str, MixedPart]) -> None:
        self.parts = parts
        self.max_prompt_length = max(part.prompts.max_prompt_length for part in parts.values())
        """Length of the longest prompt, in tokens."""
        notes = [getattr(part.prompts, "note", "") for part in parts.values()]
        self.note = "\n".join(filter(None, notes))
        columns: dict[str, None] = {}
        for part in parts.values():
            for row in range(len(part)):
                columns.update(dict.fromkeys(other_columns(part[row])))
        for part in parts.values():
            part.columns = columns

    def __len__(self) -> int:
        return sum(map(len, self.parts.values()))

    def __getitem__(self, index: int) -> Prompt:
        for part in self.parts.values():
            if index < len(part):
                return part[index]
            index -= len(part)
        raise IndexError("PromptMix: index out of range")


def takes_tools(node: Mapping[str, Any]) -> bool:
    """Whether a data set's component has the argument `tools`, and its section does not set it."""
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
    """Build a mix of data sets.

    Args:
        tokenizer: torchtune's tokenizer.
        parts: for each name, the `_component_` of a data set with its arguments, and a `weight`
            (default 1): its share of the prompts, relative to the weights of the other parts.
        tools: JSON schemas of the tools that the policy may call, for parts with this argument.

    Raises:
        ValueError: a part cannot be built; the message names it.
    """
    if not isinstance(parts, Mapping) or not parts:
        raise ConfigError("dataset.parts", f"{parts} given", "a `_component_` for each name")
    built: dict[str, MixedPart] = {}
    first_index = 0
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
            last = max(prompts[index]["prompt_index"] for index in range(len(prompts)))
        except ValueError as error:
            text = str(error).replace("allowed: dataset.", f"allowed: {key}.")
            own = text.removeprefix("dataset.")
            raise ValueError(f"{key}.{own}" if own != text else f"{key}: {text}") from error
        except Exception as error:  # a component may raise anything on wrong arguments
            what = f"{node['_component_']} cannot be built: {type(error).__name__}: {error}"
            raise ValueError(f"{key}: {what}") from error
        built[name] = MixedPart(prompts, weight, first_index)
        first_index += last + 1
    return PromptMix(built)
