"""Checks the arguments of `checkpointer`, which only the trainers build."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from torchtune.training import FormattedCheckpointFiles

from grpo_components.errors import fail, shown

_HF = "torchtune.training.FullModelHFCheckpointer"
_MAX_FILES = 10_000
"""Maximum number of files of one model; the largest on the hub have a few hundred."""


def checkpoint_files(node: DictConfig, base: Path, run_folder: str) -> list[Path]:
    """Check the checkpointer's arguments, and return the files that it would read."""
    path = node["_component_"]
    if path.startswith("torchtune.") and path.rpartition(".")[2] != "FullModelHFCheckpointer":
        problem = f"{path} given, and base_model_path has Hugging Face's format, which vLLM needs"
        fail("checkpointer._component_", problem, _HF)
    for key in ("should_load_recipe_state", "resume_from_checkpoint"):
        if node.get(key):
            problem = f"{shown(node[key])} given, and this recipe saves its own state"
            fail(f"checkpointer.{key}", problem, "false; resume_from_checkpoint at the top resumes")
    output_dir = node.get("output_dir")
    if isinstance(output_dir, str) and output_dir != run_folder:
        check_writable("checkpointer.output_dir", Path(output_dir).resolve())
        if Path(output_dir).resolve().is_relative_to(base.resolve()):
            problem = f"{output_dir} given, a folder in base_model_path"
            fail("checkpointer.output_dir", problem, "a folder outside of it")
    key = "checkpointer.checkpoint_files"
    names: Any = node.get("checkpoint_files")
    if isinstance(names, DictConfig | ListConfig):
        names = OmegaConf.to_container(names)
    if isinstance(names, dict):
        names = _numbered(key, names)
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
        fail(key, f"{shown(names)} given", "a list of file names")
    if len(names) > _MAX_FILES:
        fail(key, f"{len(names)} names given", f"at most {_MAX_FILES}")
    return [base / name for name in names]


def check_writable(key: str, folder: Path) -> None:
    """Refuse a folder in which nothing can be made, or which cannot be made itself."""
    nearest = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    try:  # in some places, such as /proc, even root can make no folder
        tempfile.TemporaryDirectory(prefix=".grpo-", dir=nearest).cleanup()
    except OSError as error:
        fail(key, f"nothing can be made in {nearest}: {error.strerror}", "a writable place")


def _numbered(key: str, node: dict[str, Any]) -> list[str]:
    """Return the names of numbered files, from `filename_format` and `max_filename`."""
    last = str(node.get("max_filename"))
    if not last.isdecimal() or len(last) > 9 or not 1 <= int(last) <= _MAX_FILES:
        fail(f"{key}.max_filename", f"{shown(last)} given", f"a number of 1 to {_MAX_FILES}")
    try:
        return FormattedCheckpointFiles.from_dict(node).build_checkpoint_filenames()
    except Exception as error:  # a format string may raise anything
        problem = f"{shown(node)} given, {type(error).__name__}: {error}"
        fail(key, problem, "filename_format, with two {}, and max_filename")
