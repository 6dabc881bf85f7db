"""Reads the overrides of a command, and derives the command that resumes its run."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from torchtune.config._utils import _remove_key_by_dotpath
from yaml import YAMLError

from grpo_components._plugin import config_files, recipes_folder
from grpo_components.errors import fail, shown

_RESUME = "resume_from_checkpoint"


def merge_overrides(given: dict[str, Any], overrides: Sequence[str]) -> DictConfig:
    """Merge a config with overrides as torchtune does, which refuses `=` in a value.

    `loss=<path>` sets `loss._component_`, whether or not the config has one there.
    """
    merged: list[Any] = [given]
    for override in overrides:
        key, separator, value = override.partition("=")
        if key.startswith("~"):
            try:
                _remove_key_by_dotpath(given, key[1:])
            except (KeyError, ValueError, TypeError):
                fail(key, "cannot be removed", f"a key of the config; a component: {key[1:]}=null")
            continue
        if not (key and separator):
            fail("overrides", f"{override} given", "key=value")
        rewards = given.get("rewards") or {}
        if value == "null" and key.startswith("rewards.") and key.split(".")[1] not in rewards:
            fail(key, "null given, and the config has no such reward", ", ".join(rewards))
        node = given.get(key)
        has_component = isinstance(node, Mapping) and "_component_" in node
        if has_component or (key == "loss" and not value.startswith("{")):
            key += "._component_"
        if "max_filename" in key:
            value = f"!!str {value}"  # else 00003 would be a number
        try:
            merged.append(OmegaConf.from_dotlist([f"{key}={'null' if value == 'None' else value}"]))
        except YAMLError as error:
            problem = f"{shown(value)} given: {getattr(error, 'problem', error)}"
            fail(key, problem, "YAML, with a text of several signs in quotes")
    return cast(DictConfig, OmegaConf.merge(*merged))


def resume_command(argv: Sequence[str]) -> str:
    """Return the command that resumes a run, as its user would type it; empty if unknown."""
    recipe, *arguments = argv
    if not any(argument.partition("=")[0] == "--config" for argument in arguments):
        return ""
    names = {str(path): name for name, path in config_files(recipes_folder() / "configs").items()}
    kept = [names.get(argument, argument) for argument in arguments if not _resumes(argument)]
    return shlex.join(["tune", "run", _recipe_name(recipe), *kept, f"{_RESUME}=true"])


def _resumes(argument: str) -> bool:
    return argument.lstrip("~").partition("=")[0] == _RESUME


def _recipe_name(recipe: str) -> str:
    """Return the name or path by which `tune run` finds a recipe."""
    path = Path(recipe)
    if not path.is_file():
        path = Path(f"{recipe.replace('.', '/')}.py")
    if path.resolve().parent == recipes_folder().resolve():
        return path.stem
    if not path.is_file():
        return recipe
    below = path.resolve().is_relative_to(Path.cwd().resolve())
    return os.path.relpath(path) if below else str(path.resolve())
