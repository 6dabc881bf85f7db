"""Derives the command that resumes a run from the command that started it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from grpo_components._plugin import config_files, recipes_folder

_RESUME = "resume_from_checkpoint"


def resume_command(argv: Sequence[str]) -> str:
    """Return the command that resumes a run, as its user would type it; empty if unknown.

    Args:
        argv: recipe, options and overrides, as `tune run` leaves them in `sys.argv`: the names of
            shipped recipes and configs are replaced by paths, and a copy's path is a dotted name.
    """
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
