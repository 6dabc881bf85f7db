"""Starts Ray for one run: private to it, on loopback, and without the parts that no run uses."""

from __future__ import annotations

import logging
import os
import secrets
import signal
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import ray
from ray._private import parameter, ray_constants
from ray._private import worker as ray_worker

_REGISTER_S = 600
"""Longest wait for a worker to register, in seconds; the parent of the roles may have to import."""
_SYSTEM_CONFIG = {
    # Ray would start idle workers, which no role can use: each has its own environment.
    "enable_worker_prestart": False,
    "prestart_worker_first_driver": False,
    "worker_register_timeout_seconds": _REGISTER_S,
}
_LOG = logging.getLogger("cluster")


def start_ray(temp_dir: Path, log_level: str, object_store_memory: int | None) -> None:
    """Start Ray on this machine.

    Args:
        temp_dir: folder for Ray's files.
        log_level: logging level of Ray.
        object_store_memory: bytes of shared memory for Ray's objects; None lets Ray choose.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"  # `exit_code` shows each failure once
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    # A secret for this run; otherwise Ray writes one into the user's home folder.
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    # Ray prints a paragraph about every dead process, but the line of `note` is enough.
    ray_worker.print_to_stdstream = lambda message, *_, **__: _LOG.info("%s", message)
    # The only switch that makes all of Ray's processes listen on loopback only.
    ray_constants.ENABLE_RAY_CLUSTER = False
    # `ray.init` has no arguments for these: the autoscaler and the copier of logs to the driver
    # have nothing to do here, and our `setup_worker` forks the workers from a parent.
    parameters = partial(
        parameter.RayParams,
        no_monitor=True,
        include_log_monitor=False,  # pyright: ignore[reportArgumentType] a wrong annotation of Ray
        setup_worker_path=str(Path(__file__).with_name("setup_worker.py")),
    )
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        with mock.patch.object(parameter, "RayParams", parameters):
            ray.init(
                address="local",
                include_dashboard=False,
                log_to_driver=False,
                logging_level=getattr(logging, "ERROR" if log_level == "WARNING" else log_level),
                object_store_memory=object_store_memory,
                _temp_dir=str(temp_dir),
                _system_config=dict(_SYSTEM_CONFIG),  # Ray writes into it, e.g. where it spills
            )
    except SystemExit:  # of the SIGTERM handler that Ray sets
        signal.signal(signal.SIGTERM, on_sigterm)
        signal.raise_signal(signal.SIGTERM)
        raise
    signal.signal(signal.SIGTERM, on_sigterm)


def objects_in_scope() -> int:
    """Return the number of Ray objects that this process still refers to."""
    core: Any = ray_worker.global_worker.core_worker  # pyright: ignore[reportAttributeAccessIssue]
    return len(core.get_all_reference_counts())
