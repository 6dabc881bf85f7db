"""The folder of a run: locked, with the resolved config in it, and never overwritten."""

from __future__ import annotations

import errno
import os
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

_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)


def real_path(path: str | Path) -> Path:
    """A path as an absolute one without symbolic links; what is missing of it is kept.

    Args:
        path: as a person writes it.
    """
    return Path(os.path.realpath(path))


def prepare_output_folder(
    folder: Path, cfg: Settings, identity: RunIdentity
) -> tuple[FolderLock, Path | None]:
    """Make and lock the folder of a new run; that of an earlier run is moved aside.

    Only who has the lock of a folder moves it, so that a living run stays where it is.

    Args:
        folder: of the run, without symbolic links.
        cfg: written into it, resolved, as config.yaml.
        identity: of this process, written beside it.

    Returns:
        The lock, and where an earlier run was moved to (`<name>-1`, `-2`, ...), or None.

    Raises:
        ValueError: naming output_dir, if another process has the folder, or if it holds what no
            run wrote.
    """
    moved_to = None
    while True:
        is_used(folder)  # before a lock file is made in what is not a run's
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
    """Whether a folder holds an earlier run, which a new one would move aside; locks nothing.

    Args:
        folder: without symbolic links; may be missing.

    Raises:
        ValueError: naming output_dir, if a process of this machine has it, if it holds anything
            else, or if it is a part of a run's folder.
    """
    while True:
        refuse_folder_in_use(folder)
        seen = _inode(folder)
        try:
            return _is_used(folder)
        except ValueError:
            refuse_folder_in_use(folder)
            if _inode(folder) == seen:  # or another process moved it aside meanwhile
                raise


def _inode(folder: Path) -> int | None:
    try:
        return folder.stat().st_ino
    except OSError:
        return None


def _is_used(folder: Path) -> bool:
    if run := lies_in_run(folder):
        fail("output_dir", f"{short(folder)} lies in a run's folder, {short(run)}", "another place")
    allowed = "a new or empty folder, or one that holds a run and nothing else"
    try:
        if not folder.exists() or is_empty(folder):
            return False
        if not is_run(folder):
            problem = f"{short(folder)} is not empty, and what it holds is not a run of this recipe"
            fail("output_dir", problem, allowed)
        if found := foreign_entry(folder):
            problem = f"{short(folder)} holds {short(found)}, which no run wrote"
            fail("output_dir", problem, allowed)
    except OSError as error:
        fail("output_dir", f"{short(folder)} cannot be read: {error.strerror}", allowed)
    return True


def _move_aside(folder: Path) -> Path:
    number = 0
    while True:
        number += 1
        moved_to = folder.with_name(f"{folder.name}-{number}")
        if os.path.lexists(moved_to):
            continue
        try:
            folder.rename(moved_to)
        except OSError as error:
            if error.errno in _TAKEN:  # by another process, a moment ago
                continue
            problem = f"{short(folder)} holds an earlier run and cannot be moved aside"
            fail("output_dir", f"{problem}: {error.strerror}", "another folder")
        return moved_to


def reopen_output_folder(folder: Path, cfg: Settings, attempt: int, identity: RunIdentity) -> None:
    """Make a run's folder ready for another attempt: whatever is written is appended to.

    Args:
        folder: of the run, locked.
        cfg: becomes config.yaml; that of the attempt before stays as config_attempt_<n>.yaml.
        attempt: which life of the run begins.
        identity: of this process.
    """
    (folder / "logs").mkdir(exist_ok=True)
    if (folder / "config.yaml").exists():
        (folder / "config.yaml").rename(folder / f"config_attempt_{attempt - 1}.yaml")
    _write_config(folder, cfg, identity)
    for path in [*folder.glob("*.jsonl"), *folder.glob("logs/*.jsonl")]:
        cut_torn_line(path)


def _write_config(folder: Path, cfg: Settings, identity: RunIdentity) -> None:
    """With the identity as comments: the file is a config like any other."""
    head = "".join(f"# {name}: {value}\n" for name, value in identity.as_dict().items())
    text = head + OmegaConf.to_yaml(OmegaConf.create(cfg.model_dump()))
    (folder / "config.yaml").write_text(text, encoding="utf-8")
