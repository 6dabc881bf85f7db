"""Checkpoints on disk: Hugging Face folders that are either whole or not there."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from huggingface_hub import save_torch_state_dict
from torch import Tensor

_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".index.json")
"""Files of the base model that hold or list its weights."""


def save_hf_checkpoint(
    state_dict: dict[str, Tensor], base_model_path: Path, checkpoints: Path, step: int
) -> Path:
    """Write a folder that `transformers` and vLLM load as it is, and point `latest` at it.

    The folder is written beside, synced to disk, and published by renames; a crash in between
    leaves the earlier checkpoints and `latest` untouched.

    Args:
        state_dict: Hugging Face names to CPU tensors.
        base_model_path: folder whose config and tokenizer files are copied.
        checkpoints: folder of all checkpoints of the run.
        step: training steps done.

    Returns:
        The folder, `checkpoints/step_<step>`.
    """
    target = checkpoints / f"step_{step}"
    unfinished = checkpoints / f".step_{step}.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    save_torch_state_dict(state_dict, unfinished, max_shard_size="5GB")
    for file in base_model_path.iterdir():
        if file.is_file() and not file.name.endswith(_NOT_COPIED):
            shutil.copy2(file, unfinished / file.name)
    for path in [*unfinished.iterdir(), unfinished]:
        _sync(path)
    if target.exists():
        shutil.rmtree(target)
    unfinished.rename(target)
    link = checkpoints / ".latest.unfinished"
    link.unlink(missing_ok=True)
    link.symlink_to(target.name)
    link.replace(checkpoints / "latest")
    _sync(checkpoints)
    return target


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
