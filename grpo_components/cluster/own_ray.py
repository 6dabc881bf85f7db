"""A Ray of the run's own, on this machine and loopback only."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import ray

from grpo_components.cluster.leftovers import make_temp_dir, remove_temp_dir, sweep
from grpo_components.cluster.placement import Need
from grpo_components.cluster.ray_start import start_ray
from grpo_components.cluster.role_parents import RoleParents

_SHUTDOWN_KILL_S = 5.0
"""Seconds a stopped process may take to end before it is killed."""
_EARLY = ("torch", "torchtune", "torchrl")
"""What most roles import, less Ray and what imports it."""


class OwnRay:
    """Starts Ray for one run and forks the roles' processes from a parent."""

    def __init__(
        self,
        logs: Path,
        log_level: str,
        note: Callable[[str], None],
        object_store_memory: int | None,
        early: Mapping[str, str] | None,
    ) -> None:
        self._log_level, self._note, self._early = log_level, note, early
        self._object_store_memory = object_store_memory
        # Processes that `stop` must leave alone, e.g. a logger's service.
        self._not_ours = set(psutil.Process().children(recursive=True))
        self.scratch = make_temp_dir()
        """Folder for temporary files of the run."""
        self._parents = RoleParents(self.scratch, logs / "role_parent.log", note)

    def start(self) -> None:
        """Start Ray, and remove what killed runs left behind."""
        if swept := sweep():
            self._note(f"removed what killed runs left behind: {', '.join(swept)}")
        if self._early is not None:
            self._parents.start(dict(self._early), _EARLY)
        start_ray(self.scratch, self._log_level, self._object_store_memory)

    def reserve(self, needs: Mapping[str, Need], timeout_s: float) -> None:
        """Do nothing: preflight has checked that the roles fit on this machine."""

    def why_no_room(self, names: Sequence[str]) -> str:
        """Return the empty string: the only machine that there is lives."""
        return ""

    def options(
        self, name: str, role_class: str, variables: dict[str, str], num_gpus: float
    ) -> dict[str, Any]:
        """Return Ray's options for the process of a role."""
        more = self._parents.variables(role_class, variables, num_gpus)
        environment = {"env_vars": variables | more}
        return {"num_cpus": 0, "num_gpus": num_gpus, "runtime_env": environment}

    def stop(self, kill_roles: Callable[[], None]) -> None:
        """Kill every process of the run, whatever its state, and remove Ray's folder."""
        processes = set(psutil.Process().children(recursive=True)) - self._not_ours
        kill_roles()
        self._parents.stop()
        try:
            ray.shutdown()
        finally:
            _end(processes)
            remove_temp_dir(self.scratch)


def _end(processes: Iterable[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=_SHUTDOWN_KILL_S)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=_SHUTDOWN_KILL_S)
