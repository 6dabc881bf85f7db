"""Copies the code that a run executes into its folder, with versions, git commits and host."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_components._plugin import recipes_folder
from grpo_components.user_code import MAX_MODULES, PACKAGE, is_installed, user_modules
from grpo_components.whole_files import write_whole

CODE = "code"
"""Folder of all snapshots in a run's folder; each is in a subfolder `attempt_<n>`."""
ABOUT = "environment.json"
"""File of a snapshot with recipe, packages, git commits and host."""
MAX_FILE_BYTES = 2**20
MAX_FILES = MAX_MODULES
MAX_BYTES = 16 * 2**20
"""Limits of one snapshot; what is beyond them is listed in `ABOUT`."""
_GIT_S = 10.0
"""Seconds that one git command may take."""


@dataclass
class _Copies:
    """The files copied into one snapshot."""

    folder: Path
    taken: dict[str, str] = field(default_factory=dict)
    """Path in the snapshot -> original path."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Original path -> why it was not copied."""
    num_bytes: int = 0

    def add(self, source: Path, name: str) -> None:
        """Copy one file, or record why not."""
        try:
            size = source.stat().st_size
            if size > MAX_FILE_BYTES:
                self.left_out[str(source)] = f"larger than {MAX_FILE_BYTES} bytes"
            elif len(self.taken) >= MAX_FILES or self.num_bytes + size > MAX_BYTES:
                self.left_out[str(source)] = "the snapshot is full"
            else:
                content = source.read_bytes()
                target = self.folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
                self.taken[name] = str(source)
                self.num_bytes += size
        except FileNotFoundError:  # removed since it was imported
            self.left_out[str(source)] = "no such file"
        except PermissionError as error:
            self.left_out[str(source)] = f"cannot be read: {error.strerror}"


def save_code(output_dir: Path, attempt: int, recipe: str | None) -> Path:
    """Write the snapshot of an attempt, and name its recipe in the run's config.yaml.

    Contains the recipe's file, every module of the user that this process imported or that such a
    module imports, and `ABOUT`. Environment variables are not recorded: they may be secret.
    """
    folder = output_dir / CODE / f"attempt_{attempt}"
    shutil.rmtree(folder, ignore_errors=True)  # of a process that ended before its first receipt
    folder.mkdir(parents=True)
    copies, about = _Copies(folder), _recipe(recipe)
    if recipe is not None:
        copies.add(Path(recipe), Path(recipe).name)
    for name, source in sorted(user_modules(recipe).items()):
        copies.add(source, f"modules/{name}")
    checkouts = {"user": _repository(Path.cwd()), "recipe": None, "project": None}
    if recipe is not None and not about["shipped"]:
        checkouts["recipe"] = _repository(Path(recipe).resolve().parent)
    if not is_installed(PACKAGE):
        checkouts["project"] = _repository(PACKAGE)
    record = {
        "recipe": about,
        "files": copies.taken,
        "left_out": copies.left_out,
        "git": checkouts,
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "packages": _packages(),
    }
    text = json.dumps(record, indent=1) + "\n"
    (folder / ABOUT).write_text(text, encoding="utf-8")
    _name_recipe(output_dir / "config.yaml", about, f"{CODE}/{folder.name}")
    return folder


def copy_code(run: Path, folder: Path) -> None:
    """Copy the snapshots of a run's earlier attempts into another folder of the same run."""
    if (run / CODE).is_dir():
        shutil.copytree(run / CODE, folder / CODE, dirs_exist_ok=True)


def _recipe(recipe: str | None) -> dict[str, Any]:
    """Describe the recipe: its file, hash, and whether it is ours, and unchanged."""
    if recipe is None:
        return {"file": None, "sha256": None, "shipped": False, "same_as_shipped": False}
    content, path = Path(recipe).read_bytes(), Path(recipe).resolve()
    shipped = [file.resolve() for file in recipes_folder().glob("*.py")]
    return {
        "file": str(path),
        "sha256": hashlib.sha256(content).hexdigest(),
        "shipped": path in shipped,
        "same_as_shipped": any(file.read_bytes() == content for file in shipped),
    }


def _name_recipe(config: Path, recipe: Mapping[str, Any], code: str) -> None:
    """Say in config.yaml, as a comment, which recipe the objective comes from."""
    if recipe["shipped"]:
        return
    if recipe["file"] is None:
        said = "unknown: it was given no file"
    elif recipe["same_as_shipped"]:
        said = f"{recipe['file']}, an unchanged copy of the shipped recipe"
    else:
        said = f"{recipe['file']}, a changed copy: its loss, advantages and loops are in {code}"
    lines = config.read_text(encoding="utf-8").splitlines(keepends=True)
    head = next((n for n, line in enumerate(lines) if not line.startswith("# ")), len(lines))
    said = " ".join(said.split())  # a file name may contain a line end
    write_whole(config, "".join([*lines[:head], f"# recipe: {said}\n", *lines[head:]]))


@functools.cache
def _packages() -> dict[str, str]:
    """Map the names of all installed packages to their versions."""
    found = {
        str(each.metadata["Name"]): each.version for each in importlib.metadata.distributions()
    }
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def _repository(folder: Path) -> dict[str, Any] | None:
    """Describe the git checkout that contains a folder; None if there is none."""
    try:
        root = _git(folder, "rev-parse", "--show-toplevel")
        if root is None:
            return None
        commit = _git(folder, "rev-parse", "--verify", "--quiet", "HEAD")  # None: no commit yet
        changes = _git(folder, "status", "--porcelain")
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"problem": f"{type(error).__name__}: git did not answer"}
    return {"root": root, "commit": commit, "dirty": None if changes is None else bool(changes)}


def _git(folder: Path, *arguments: str) -> str | None:
    """Return what a git command prints; None if it fails."""
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments],
        env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},  # do not touch the user's index
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_GIT_S,
    )
    return done.stdout.strip() if done.returncode == 0 else None
