"""Builds the teacher of a distillation: the policy's decoder with the weights of another folder."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from torch import nn
from torchtune import config


def teacher_builders(
    model: DictConfig, checkpointer: DictConfig, path: str
) -> tuple[Callable[[], nn.Module], Callable[[], Any]]:
    """Return the functions that build a teacher's model and checkpointer.

    Args:
        model: section `model` of the policy.
        checkpointer: section `checkpointer` of the policy.
        path: folder of the teacher.
    """
    return partial(config.instantiate, model), partial(_checkpointer, checkpointer, path)


def _checkpointer(node: DictConfig, path: str) -> Any:
    files = sorted(file.name for file in Path(path).glob("*.safetensors"))
    changed = {"checkpoint_dir": path, "checkpoint_files": files}
    return config.instantiate(DictConfig({**node, **changed}))
