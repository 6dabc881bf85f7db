"""Chooses the parent of each role's process; see `role_parent`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from grpo_components.cluster.role_parent import RoleParent
from grpo_components.cluster.setup_worker import MODULE_VARIABLE, SOCKET_VARIABLE

_OURS = "grpo_components."
_LOG = logging.getLogger("cluster")


class RoleParents:
    """Starts a parent per number of threads: OpenMP reads that number once, when it is loaded."""

    def __init__(self, folder: Path, log_file: Path, note: Callable[[str], None]) -> None:
        self._folder, self._log_file, self._note = folder, log_file, note
        self._parents: dict[str, RoleParent] = {}
        self._lost: set[str] = set()

    def start(self, environment: dict[str, str], early: Sequence[str] = ()) -> None:
        """Start a parent."""
        loaded = {name: environment[name] for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY")}
        threads = environment["OMP_NUM_THREADS"]
        log_file, name = self._log_file, f"parent_{threads}"
        self._parents[threads] = RoleParent(self._folder, name, log_file, loaded, early)

    def variables(
        self, role_class: str, environment: dict[str, str], num_gpus: float = 0
    ) -> dict[str, str]:
        """Return the variables that make `setup_worker` fork a role; none if it starts alone."""
        if num_gpus:
            _LOG.info("%s has a GPU: it is not forked, and imports by itself", role_class)
            return {}
        threads = environment["OMP_NUM_THREADS"]
        if threads not in self._parents:
            self.start(environment)
        parent = self._parents[threads]
        if not parent.lives():
            if threads not in self._lost:
                self._lost.add(threads)
                self._note(
                    "the parent of the roles ended: roles import everything by themselves from now "
                    f"on; its log: {self._log_file}"
                )
            return {}
        module = role_class.rpartition(".")[0]
        imported = {MODULE_VARIABLE: module} if module.startswith(_OURS) else {}
        return {SOCKET_VARIABLE: parent.address, **imported}

    def stop(self) -> None:
        """End all parents."""
        for parent in self._parents.values():
            parent.stop()
