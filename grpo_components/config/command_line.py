"""Reads the config and the overrides of a command `tune run`, before anything heavy is imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from omegaconf import DictConfig

from grpo_components._plugin import list_or_copy
from grpo_components._tune_run import RECIPE, is_run_of_ours
from grpo_components._tune_run import main as tune
from grpo_components.config.preflight import check_values_and_files, check_what_is_imported
from grpo_components.config.reading import read_config_file
from grpo_components.errors import ConfigError, fail
from grpo_components.settings import Settings

T = TypeVar("T")
_RANKS = ("--nproc_per_node", "--nproc-per-node", "--nnodes")
"""Options of torchrun, which would start several drivers."""


def main() -> None:
    """Run torchtune's `tune`; a wrong config of our recipe ends it before Ray is imported."""
    if sys.argv[1:2] in (["ls"], ["cp"]):
        return list_or_copy()
    words = sys.argv[2:] if sys.argv[1:2] == ["run"] else []
    settings = _or_exit(check_early, words, sys.exit)
    # Nothing has begun, and Python would take a second to clear all modules.
    check = partial(_or_exit, check_what_is_imported, settings, os._exit)
    tune(check if settings else None)


def check_early(words: Sequence[str]) -> Settings | None:
    """Return the checked settings of a `tune run`.

    None if only torchtune or an edited recipe can read the config.
    """
    for option in (word.partition("=")[0] for word in words if word.startswith(_RANKS)):
        if is_run_of_ours(["tune", "run", *words]):
            allowed = "num_trainers=<number of ranks>, without options of torchrun"
            fail(option, "given, and the recipe starts its ranks itself", allowed)
    given = _given(words)
    return None if given is None else check_values_and_files(given)


def _or_exit(check: Callable[[Any], T], given: Any, end: Callable[[int], NoReturn]) -> T:
    try:
        return check(given)
    except ConfigError as error:
        sys.stderr.write(f"config error: {error}\n")
        sys.stdout.flush()
        sys.stderr.flush()
        end(2)


def _given(words: Sequence[str]) -> DictConfig | None:
    """Return the config of a `tune run` command; None if only torchtune or a fork can read it.

    A fork (edited recipe) that changes the config or `sys.path` has to check its config itself.
    """
    if "--config" not in words[1:-1]:
        return None
    at = words.index("--config")
    recipe, name, overrides = words[0], words[at + 1], [*words[1:at], *words[at + 2 :]]
    if any(word[:1] == "-" for word in (recipe, name, *overrides)):
        return None
    try:
        text = b"read_config(given)" if recipe == RECIPE else Path(recipe).read_bytes()
    except OSError:
        return None
    if b"read_config(given)" not in text or b"sys.path" in text:
        return None
    return read_config_file(name, overrides)
