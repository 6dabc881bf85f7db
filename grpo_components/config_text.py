"""Checks a command line before its config is parsed: sizes, and what is to be removed."""

from __future__ import annotations

import argparse
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from grpo_components.errors import fail

MAX_BYTES = 2**18
"""Maximum size of a config file or of one override; the longest shipped config has 8 KiB."""
_NULLS = ("None", "null", "~")


def check_command(argv: Sequence[str]) -> None:
    """Refuse a config file or override that cannot be read, or a removal of what is not there."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--config")
    try:
        known, overrides = parser.parse_known_args(argv)
    except argparse.ArgumentError:
        return  # torchtune's parser will refuse it and print its usage
    text = None if known.config is None else _read(known.config)
    for override in overrides:
        key, _, value = override.partition("=")
        if len(override) > MAX_BYTES:
            fail(key, f"{len(override)} characters given", f"at most {MAX_BYTES}")
        if text is not None and (key.startswith("~") or value in _NULLS):
            _check_removal(text, key)


def _check_removal(text: str, key: str) -> None:
    """Refuse to remove what cannot be removed: a component by `~`, or a reward that is not there.

    A reward is removed by null, see `read_settings`.
    """
    try:
        config = yaml.safe_load(text)
    except (ValueError, yaml.YAMLError):  # such as a date that does not exist: text in OmegaConf
        return
    if not isinstance(config, dict):
        return
    path = key.removeprefix("~").removesuffix("._component_")
    section, _, name = path.rpartition(".")
    if not key.startswith("~"):
        rewards = config.get("rewards")
        names = list(map(str, rewards)) if isinstance(rewards, Mapping) else [name]
        if section == "rewards" and name not in names:
            fail(path, "null given, and the config has no such reward", ", ".join(names))
        return
    node, around = _at(config, path), _at(config, section) if section else config
    if isinstance(node, Mapping) and "_component_" in node:
        fail(key, "~ removes no component", f"{path}=null")
    if not (isinstance(around, Mapping) and name in around):
        fail(key, "the config has no such key", "a key of the config")


def _read(path: str) -> str | None:
    try:
        mode = Path(path).stat().st_mode
        if stat.S_ISFIFO(mode):
            return None  # a pipe, as in `--config <(...)`, can be read only once
        if not stat.S_ISREG(mode):
            fail("--config", f"{path} is not a file", "a YAML file, or a name that `tune ls` shows")
        with Path(path).open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        text = data.decode("utf-8")
    except OSError as error:
        problem = f"{path} cannot be read: {error.strerror}"
        fail("--config", problem, "a YAML file, or a name that `tune ls` shows")
    except ValueError as error:  # a null byte in the path, or not UTF-8
        fail("--config", f"{path} is not text: {error}", "a YAML file in UTF-8")
    if len(data) > MAX_BYTES:
        fail("--config", f"{path} has more than {MAX_BYTES} bytes", "a shorter file")
    return text


def _at(given: Any, path: str) -> Any:
    for name in path.split("."):
        if isinstance(given, list) and name.isdigit() and int(name) < len(given):
            given = given[int(name)]
        elif isinstance(given, Mapping):
            given = given.get(name)
        else:
            return None
    return given
