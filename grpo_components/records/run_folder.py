"""Prepares a run's folder: lock, config, snapshot of the code; never overwrites another run."""

from __future__ import annotations

import fcntl
import importlib.metadata
import itertools
import json
import logging
import os
import platform
import re
import secrets
import shutil
import socket
import subprocess
from pathlib import Path
from typing import NamedTuple, TextIO

from omegaconf import OmegaConf

from grpo_components.errors import fail
from grpo_components.files import cut_torn_line
from grpo_components.settings import Settings

LOCK = "run.lock"
"""Name of the lock file; its text names the process that holds the folder."""
CODE = "code"
"""Subfolder of a run's folder with a snapshot of the code for each attempt: `attempt_<n>`."""
_CONFIG_HEAD = "# run: "
"""First characters of every run's config.yaml; `is_used` recognizes a run's folder by them."""
_NOBODYS = (LOCK, "lost+found", ".gitkeep", ".gitignore", ".DS_Store")
_GIT_S = 10.0
_log = logging.getLogger(__name__)


class RunIdentity(NamedTuple):
    """Ids of a run in its config, receipts and checkpoints; the audit compares them."""

    run: str
    """Id of the run, the same in all attempts; 32 hexadecimal digits."""
    incarnation: str
    """Id of the driver's process, new at every start; 32 hexadecimal digits."""


def new_identity(run: str | None = None) -> RunIdentity:
    """Make the ids of a process that starts a run, or that resumes the run with the id `run`."""
    return RunIdentity(run or secrets.token_hex(16), secrets.token_hex(16))


def lock_folder(folder: Path) -> TextIO:
    """Create a folder if missing, and lock it by flock until the returned file is closed.

    The kernel closes the file when this process ends. Raises a ConfigError if the folder is locked.
    """
    path = folder / LOCK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = path.open("a+", encoding="utf-8")
    except OSError as error:
        fail("output_dir", f"{folder} cannot be written to: {error.strerror}", "a writable folder")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read() or "another process"
        file.close()
        allowed = "another folder, or this one after that run has ended"
        fail("output_dir", f"{folder} is in use by {holder}", allowed)
    except OSError as error:
        _log.warning("%s has no file locks: start no second run in it (%s)", folder, error)
    if not (path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat())):
        file.close()  # the folder was moved aside before it was locked
        return lock_folder(folder)
    file.truncate(0)
    file.write(f"pid {os.getpid()} on {socket.gethostname()[:64]}")
    file.flush()
    return file


def refuse_folder_in_use(folder: Path) -> None:
    """Refuse a locked folder early, before it is read; `lock_folder` checks the lock again."""
    if (folder / LOCK).exists():
        lock_folder(folder).close()


def real_path(path: str | Path) -> Path:
    """Return the absolute path without symbolic links; parts that do not exist stay as they are."""
    return Path(os.path.realpath(path))


def prepare_output_folder(
    folder: Path, cfg: Settings, identity: RunIdentity
) -> tuple[TextIO, Path | None]:
    """Make and lock a new run's folder; return the lock, and where an earlier run was moved.

    A folder is moved only by the holder of its lock, so an active run keeps its folder.
    """
    moved_to = None
    is_used(folder)  # first, so that no lock file is made in a foreign folder
    lock = lock_folder(folder)
    if is_used(folder):
        moved_to = _move_aside(folder)
        lock.close()
        lock = lock_folder(folder)
    _write_config(folder, cfg, identity)
    (folder / "logs").mkdir(exist_ok=True)
    return lock, moved_to


def is_used(folder: Path) -> bool:
    """Return whether a folder has an earlier run; refuse a folder with any other contents."""
    names = {each.name for each in folder.iterdir()} if folder.is_dir() else set[str]()
    if names <= {*_NOBODYS}:
        return False
    if (config := folder / "config.yaml").is_file():
        with config.open(encoding="utf-8", errors="replace") as file:
            if file.read(len(_CONFIG_HEAD)) == _CONFIG_HEAD:
                return True
    problem = f"{folder} is not empty and does not contain a run of this recipe"
    fail("output_dir", problem, "a new or empty folder, or the folder of a run")


def free_name(folder: Path) -> Path:
    """Return the path to move an earlier run to: the first free one of `<name>-1`, `-2`, ..."""
    names = (folder.with_name(f"{folder.name}-{number}") for number in itertools.count(1))
    return next(name for name in names if not os.path.lexists(name))


def _move_aside(folder: Path) -> Path:
    try:
        return folder.rename(free_name(folder))
    except OSError as error:
        problem = f"{folder} contains an earlier run and cannot be moved aside"
        fail("output_dir", f"{problem}: {error.strerror}", "another folder")


def reopen_output_folder(folder: Path, cfg: Settings, attempt: int, identity: RunIdentity) -> None:
    """Prepare a run's locked folder for another attempt; keep the previous attempt's config."""
    (folder / "logs").mkdir(exist_ok=True)
    if (folder / "config.yaml").exists():
        (folder / "config.yaml").rename(folder / f"config_attempt_{attempt - 1}.yaml")
    _write_config(folder, cfg, identity)
    for path in [*folder.glob("*.jsonl"), *folder.glob("logs/*.jsonl")]:
        cut_torn_line(path)


def _write_config(folder: Path, cfg: Settings, identity: RunIdentity) -> None:
    """Write config.yaml; the identity goes into comments, so that the config stays valid."""
    head = "".join(f"# {name}: {value}\n" for name, value in identity._asdict().items())
    text = head + OmegaConf.to_yaml(OmegaConf.create(cfg.model_dump()))
    (folder / "config.yaml").write_text(text, encoding="utf-8")


def save_code(output_dir: Path, attempt: int, recipe: str | None) -> None:
    """Save an attempt's recipe, user components, uncommitted changes and package versions.

    Components are modules in the current folder that config.yaml names. Changes are those of the
    current folder's git checkout. Environment variables are not saved: they may be secret.
    """
    folder = output_dir / CODE / f"attempt_{attempt}"
    shutil.rmtree(folder, ignore_errors=True)  # of a process that ended before its first receipt
    folder.mkdir(parents=True)
    modules = re.findall(r"_component_: (\w+)", (output_dir / "config.yaml").read_text("utf-8"))
    own = {file for name in modules if (file := Path(f"{name}.py")).is_file()}
    for file in (*own, *([recipe] if recipe is not None else [])):
        shutil.copy(file, folder)
    if changes := _git("diff", "HEAD"):
        (folder / "changes.diff").write_text(changes, encoding="utf-8")
    found = [package.metadata for package in importlib.metadata.distributions()]
    packages = {str(each["Name"]): each["Version"] for each in found}
    about = {
        "recipe": recipe,
        "commit": _git("rev-parse", "HEAD").strip() or None,
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "packages": dict(sorted(packages.items(), key=lambda item: item[0].lower())),
    }
    (folder / "environment.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def _git(*arguments: str) -> str:
    """Return what a git command prints in the current folder; nothing if it fails."""
    try:
        done = subprocess.run(
            ["git", *arguments],
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},  # do not touch the user's index
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_GIT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
