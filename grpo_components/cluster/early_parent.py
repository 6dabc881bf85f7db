"""Starts a parent of the roles with the command: it imports while the driver does."""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping
from pathlib import Path

from grpo_components.cluster.leftovers import make_temp_dir, remove_temp_dir
from grpo_components.cluster.role_parent import RoleParent

EARLY = ("torch", "torchtune", "torchrl")
"""What most roles import, less Ray and what imports it."""
_started: list[tuple[dict[str, str], RoleParent, Path]] = []
"""The parent that `begin` started, with its environment and folder, until `take` or `stop`."""


def begin() -> None:
    """Start the parent for the likeliest number of threads: the cores over two roles."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    environment = {
        "OMP_NUM_THREADS": str(max(1, (cores or 1) // 2)),
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    folder = make_temp_dir()
    parent = RoleParent(folder, "parent", folder / "role_parent.log", environment, EARLY)
    _started.append((environment, parent, folder))
    atexit.register(_end, parent, folder)


def take(environment: Mapping[str, str]) -> RoleParent | None:
    """Return the parent if it has this environment; the caller stops it. Otherwise it ends.

    Args:
        environment: variables that libraries read when they are loaded.
    """
    if _started and _started[0][0] == environment:
        return _started.pop()[1]
    stop()
    return None


def stop() -> None:
    """End the parent, unless it was taken."""
    while _started:
        _end(*_started.pop()[1:])


def _end(parent: RoleParent, folder: Path) -> None:
    parent.stop()
    remove_temp_dir(folder)
