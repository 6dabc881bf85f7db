"""Keeps each batch that a step trains, in a folder named by the hash in the step's receipt."""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path

from grpo_components.state_files import read_state, write_state
from grpo_components.trajectory import PackedTrajectories, batch_hash

FOLDER = "trained_batches"
"""Name of the folder of the batches, in the folder of a run."""
_NAME = "batch"


def write_batch(folder: Path, content: str, batch: PackedTrajectories) -> None:
    """Write a batch, unless it is there already; a killed process leaves no half of one."""
    if (folder / content).exists():
        return
    unfinished = folder / f".{content}.{secrets.token_hex(4)}.part"
    try:
        write_state(unfinished, _NAME, batch)
        unfinished.rename(folder / content)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def read_batch(folder: Path, content: str) -> PackedTrajectories:
    """Read a batch, and check that it is the one of its hash."""
    path = folder / content
    if not path.is_dir():
        raise ValueError(f"no batch {path}")
    try:
        batch = read_state(path, _NAME)
        found = batch_hash(batch)
    except Exception as error:  # a damaged file can raise anything
        raise ValueError(f"{path} is damaged: {error!r}") from error
    if found != content:
        raise ValueError(f"{path} is damaged: its hash is {found}")
    return batch
