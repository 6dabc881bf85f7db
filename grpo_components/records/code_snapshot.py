"""Copies the recipe that a run executes into its folder, with versions and the commit."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import socket
import subprocess
from pathlib import Path

CODE = "code"
"""Folder of all snapshots in a run's folder; each is in a subfolder `attempt_<n>`."""
_GIT_S = 10.0
"""Seconds that one git command may take."""


def save_code(output_dir: Path, attempt: int, recipe: str | None) -> None:
    """Write the recipe's file, the changes in the current folder's checkout, and versions.

    Environment variables are not recorded: they may be secret.
    """
    folder = output_dir / CODE / f"attempt_{attempt}"
    shutil.rmtree(folder, ignore_errors=True)  # of a process that ended before its first receipt
    folder.mkdir(parents=True)
    if recipe is not None:
        shutil.copy(recipe, folder)
    if changes := _git("diff", "HEAD"):
        (folder / "changes.diff").write_text(changes, encoding="utf-8")
    packages = {str(p.metadata["Name"]): p.version for p in importlib.metadata.distributions()}
    about = {
        "recipe": recipe,
        "commit": (_git("rev-parse", "HEAD") or "").strip() or None,
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "packages": dict(sorted(packages.items(), key=lambda item: item[0].lower())),
    }
    (folder / "environment.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def _git(*arguments: str) -> str | None:
    """Return what a git command prints in the current folder; None if it fails."""
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
        return None
    return done.stdout if done.returncode == 0 else None
