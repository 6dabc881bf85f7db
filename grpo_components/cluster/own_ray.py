"""A Ray of the run's own, on this machine and loopback only."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import ray
from ray._private import ray_constants

from grpo_components.cluster.placement import Need
from grpo_components.cluster.scratch import make_scratch, remove_scratch, sweep

_SHUTDOWN_KILL_S = 5.0
"""Seconds a stopped process may take to end before it is killed."""


class OwnRay:
    """Starts Ray for one run."""

    def __init__(
        self, log_level: str, note: Callable[[str], None], object_store_memory: int | None
    ) -> None:
        self._log_level, self._note = log_level, note
        self._object_store_memory = object_store_memory
        # Processes that `stop` must leave alone, e.g. a logger's service.
        self._not_ours = set(psutil.Process().children(recursive=True))
        # In the main thread, Ray would replace the handler of SIGTERM. Its processes end with the
        # thread that started them.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ray")
        self.scratch, self._lock = make_scratch()
        """Folder for temporary files of the run."""

    def start(self) -> None:
        """Start Ray, and remove what killed runs left behind."""
        if swept := sweep():
            self._note(f"removed what killed runs left behind: {', '.join(swept)}")
        os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
        # `exit_code` shows each failure once.
        os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"
        # A secret for this run; otherwise Ray writes one into the user's home folder.
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        # No public switch makes all of Ray's processes listen on loopback only.
        ray_constants.ENABLE_RAY_CLUSTER = False
        self._thread.submit(
            ray.init,
            address="local",
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging_level(self._log_level),
            object_store_memory=self._object_store_memory,
            _temp_dir=str(self.scratch),
        ).result()

    def reserve(self, needs: Mapping[str, Need], timeout_s: float) -> None:
        """Do nothing: preflight has checked that the roles fit on this machine."""

    def why_no_room(self, names: Sequence[str]) -> str:
        """Return the empty string: the only machine that there is lives."""
        return ""

    def options(self, name: str, num_gpus: float) -> dict[str, Any]:
        """Return Ray's options for the process of a role."""
        return {"num_cpus": 0, "num_gpus": num_gpus}

    def stop(self, kill_roles: Callable[[], None]) -> None:
        """Kill every process of the run, whatever its state, and remove its folder."""
        processes = set(psutil.Process().children(recursive=True)) - self._not_ours
        kill_roles()
        try:
            ray.shutdown()
        finally:
            self._thread.shutdown()
            _, alive = psutil.wait_procs(processes, timeout=_SHUTDOWN_KILL_S)
            for process in alive:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(alive, timeout=_SHUTDOWN_KILL_S)
            remove_scratch(self.scratch)
            self._lock.close()


def logging_level(log_level: str) -> int:
    """Return Ray's logging level: at WARNING it tells much that is none of the user's business."""
    return getattr(logging, "ERROR" if log_level == "WARNING" else log_level)
