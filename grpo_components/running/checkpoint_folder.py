"""The folder of checkpoints: each is whole or not there, `latest` points at a whole one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

LATEST = "latest"


def begin(checkpoints: Path, step: int) -> Path:
    """A new folder to write a checkpoint into; what a killed run left half done is removed.

    Args:
        checkpoints: folder of all checkpoints of the run.
        step: training steps done.
    """
    checkpoints.mkdir(parents=True, exist_ok=True)
    clean(checkpoints)
    unfinished = checkpoints / f".step_{step}.unfinished"
    unfinished.mkdir()
    return unfinished


def clean(checkpoints: Path) -> None:
    """Remove what is half written or half removed.

    Args:
        checkpoints: folder of all checkpoints of the run.
    """
    for leftover in checkpoints.glob(".*"):
        discard(leftover)


def publish(unfinished: Path, step: int, keep_last_n: int | None) -> Path:
    """Give a written folder its name, and point `latest` at it.

    All of it is on the disk before, and every change is one rename: a crash in between leaves
    `latest` at a whole checkpoint, this one or the one before.

    Args:
        unfinished: what `begin` returned.
        step: training steps done.
        keep_last_n: checkpoints that stay; None keeps all.

    Returns:
        The checkpoint, `step_<step>`.
    """
    checkpoints = unfinished.parent
    target = checkpoints / f"step_{step}"
    assert latest(checkpoints) != target, "a step is saved once in an attempt"
    for folder, _, files in os.walk(unfinished):
        for name in (*files, "."):
            _sync(Path(folder, name))
    discard(target)  # an earlier attempt's
    unfinished.rename(target)
    _sync(checkpoints)
    point_latest(target)
    if keep_last_n is not None:
        # Those of later steps belong to an attempt that was given up.
        others = [folder for folder in checkpoints.glob("step_*") if folder != target]
        others.sort(key=lambda folder: (_step(folder) < step, _step(folder)), reverse=True)
        for folder in others[keep_last_n - 1 :]:
            discard(folder)
    return target


def latest(checkpoints: Path) -> Path | None:
    """The checkpoint that `latest` points at; None where there is none."""
    link = checkpoints / LATEST
    return checkpoints / os.readlink(link) if link.is_symlink() else None


def point_latest(checkpoint: Path) -> None:
    """Make a whole checkpoint the one that a run resumes from."""
    link = checkpoint.parent / f".{LATEST}.unfinished"
    link.unlink(missing_ok=True)
    link.symlink_to(checkpoint.name)
    link.replace(checkpoint.parent / LATEST)
    _sync(checkpoint.parent)


def discard(path: Path) -> None:
    """Remove a folder, if it is there; one under a checkpoint's name loses that first."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        hidden = path
        if not path.name.startswith("."):
            hidden = path.with_name(f".{path.name}.discarded")
            path.rename(hidden)
        shutil.rmtree(hidden)


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
