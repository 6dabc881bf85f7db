"""Reads the config and the overrides of a command, and derives the command that resumes its run."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from grpo_components._plugin import config_files, recipes_folder
from grpo_components._tune_run import RECIPE
from grpo_components._tune_run import main as tune
from grpo_components.config.reading import plain_values, read_settings
from grpo_components.errors import ConfigError, fail, shown

_RESUME = "resume_from_checkpoint"


def main() -> Any:
    """Run torchtune's command `tune`; a run of ours with a wrong value ends before any import."""
    if sys.argv[1:2] == ["run"] and (problem := wrong_value(sys.argv[2:])):
        sys.stderr.write(f"config error: {problem}\n")
        sys.exit(2)
    return tune()


def _reads_config_as_given(recipe: Path) -> bool:
    """Whether a fork leaves the config as given; one that changes it says what is wrong."""
    try:
        return b"preflight.read_config(given)" in recipe.read_bytes()
    except (OSError, ValueError):
        return False


def merge_overrides(given: dict[str, Any], overrides: Sequence[str]) -> DictConfig:
    """Merge a config with overrides as torchtune does, which refuses `=` in a value.

    `loss=<path>` sets `loss._component_`, whether or not the config has one there.
    """
    merged: list[Any] = [given]
    for override in overrides:
        key, separator, value = override.partition("=")
        if key.startswith("~"):
            try:
                _remove(given, *key[1:].split("."))
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


def _remove(section: dict[str, Any], name: str, *rest: str) -> None:
    """Remove a key, and sections that are empty then; as in torchtune, no component."""
    if rest:
        _remove(section[name], *rest)
    if not (rest and section[name]):
        if isinstance(section[name], Mapping) and "_component_" in section[name]:
            raise ValueError(name)
        del section[name]


def wrong_value(words: Sequence[str]) -> str:
    """Return what is wrong with the config of a command `tune run ...`; empty if it cannot say."""
    if len(words) < 3 or words[1] != "--config" or any(word[:1] == "-" for word in words[2:]):
        return ""
    recipe, _, name, *overrides = words
    if recipe != RECIPE and not _reads_config_as_given(Path(recipe)):
        return ""
    path = config_files(recipes_folder() / "configs").get(name, name)
    try:
        given: Any = OmegaConf.to_container(OmegaConf.load(path))
        read_settings(plain_values(merge_overrides(dict(given), overrides)))
    except ConfigError as error:
        return str(error)
    except (OSError, ValueError, TypeError, YAMLError, OmegaConfBaseException):
        return ""
    return ""


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
