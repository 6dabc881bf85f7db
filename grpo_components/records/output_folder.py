"""Prepares the folder of a run: locks it, writes the config, never overwrites another run."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

from omegaconf import OmegaConf

from grpo_components.errors import fail
from grpo_components.files import cut_torn_line
from grpo_components.records.folder_lock import (
    LOCK,
    FolderLock,
    lock_folder,
    refuse_folder_in_use,
    short,
)
from grpo_components.records.leftover_roles import wait_for_roles
from grpo_components.records.run_contents import foreign_entry, is_empty, is_run, lies_in_run
from grpo_components.records.run_identity import RunIdentity
from grpo_components.settings import Settings

_NAME_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)


def real_path(path: str | Path) -> Path:
    """Return the absolute path without symbolic links; parts that do not exist stay as they are."""
    return Path(os.path.realpath(path))


def prepare_output_folder(
    folder: Path, cfg: Settings, identity: RunIdentity
) -> tuple[FolderLock, Path | None]:
    """Make and lock the folder of a new run; move an earlier run's folder aside.

    Only the holder of its lock moves a folder, so that a running run keeps its folder.
    """
    moved_to = None
    while True:
        is_used(folder)  # first, so that no lock file is made in a foreign folder
        lock = lock_folder(folder)
        try:
            wait_for_roles(folder, lock.died)
            if not _is_used(folder):
                (folder / "logs").mkdir(exist_ok=True)
                _write_config(folder, cfg, identity)
                return lock, moved_to
            moved_to = _move_aside(folder)
            (moved_to / LOCK).unlink(missing_ok=True)
        except BaseException:
            lock.release()
            raise
        lock.release()


def is_used(folder: Path) -> bool:
    """Whether a folder contains an earlier run, which a new run would move aside; locks nothing."""
    while True:
        refuse_folder_in_use(folder)
        seen = _inode(folder)
        try:
            return _is_used(folder)
        except ValueError:
            refuse_folder_in_use(folder)
            if _inode(folder) == seen:  # otherwise another process just moved it aside
                raise


def _inode(folder: Path) -> int | None:
    try:
        return folder.stat().st_ino
    except OSError:
        return None


def _is_used(folder: Path) -> bool:
    if run := lies_in_run(folder):
        fail("output_dir", f"{short(folder)} is inside the run {short(run)}", "another folder")
    allowed = "a new or empty folder, or one that contains a run and nothing else"
    try:
        if not folder.exists() or is_empty(folder):
            return False
        if not is_run(folder):
            problem = f"{short(folder)} is not empty and does not contain a run of this recipe"
            fail("output_dir", problem, allowed)
        if found := foreign_entry(folder):
            problem = f"{short(folder)} contains {short(found)}, which was not written by a run"
            fail("output_dir", problem, allowed)
    except OSError as error:
        fail("output_dir", f"{short(folder)} cannot be read: {error.strerror}", allowed)
    return True


def free_names(folder: Path) -> Iterator[Path]:
    """Yield the paths to which an earlier run may be moved, `<name>-1`, `-2`, ..., if not taken."""
    for number in itertools.count(1):
        path = folder.with_name(f"{folder.name}-{number}")
        if not os.path.lexists(path):
            yield path


def _move_aside(folder: Path) -> Path:
    for moved_to in free_names(folder):
        try:
            folder.rename(moved_to)
        except OSError as error:
            if error.errno in _NAME_TAKEN:  # another process took it just now
                continue
            problem = f"{short(folder)} contains an earlier run and cannot be moved aside"
            fail("output_dir", f"{problem}: {error.strerror}", "another folder")
        return moved_to
    raise AssertionError("the names do not end")


def reopen_output_folder(folder: Path, cfg: Settings, attempt: int, identity: RunIdentity) -> None:
    """Prepare a run's folder for another attempt, which appends to its files."""
    (folder / "logs").mkdir(exist_ok=True)
    if (folder / "config.yaml").exists():
        (folder / "config.yaml").rename(folder / f"config_attempt_{attempt - 1}.yaml")
    _write_config(folder, cfg, identity)
    for path in [*folder.glob("*.jsonl"), *folder.glob("logs/*.jsonl")]:
        cut_torn_line(path)


def _write_config(folder: Path, cfg: Settings, identity: RunIdentity) -> None:
    """Write config.yaml; the identity goes into comments, so that the config stays valid."""
    head = "".join(f"# {name}: {value}\n" for name, value in identity.as_dict().items())
    text = head + OmegaConf.to_yaml(OmegaConf.create(cfg.model_dump()))
    (folder / "config.yaml").write_text(text, encoding="utf-8")
