"""Starts a Ray of the run's own, without the parts that no run uses, or joins a cluster."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import ray
from ray._private import parameter, ray_constants, services
from ray._private import worker as ray_worker
from ray.exceptions import RayError

from grpo_components.errors import fail
from grpo_components.user_code import PACKAGE, user_modules

_REGISTER_S = 600
"""Longest wait for a worker to register, in seconds; the parent of the roles may have to import."""
_SYSTEM_CONFIG = {
    # Ray would start idle workers, which no role can use: each has its own environment.
    "enable_worker_prestart": False,
    "prestart_worker_first_driver": False,
    "worker_register_timeout_seconds": _REGISTER_S,
}
_CONNECT_S = 10.0
"""Longest wait for a connection to a cluster's head, in seconds."""
_LOG = logging.getLogger("cluster")


def start_ray(temp_dir: Path, log_level: str, object_store_memory: int | None) -> None:
    """Start Ray on this machine: private to the run, and on loopback only."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    _quiet()
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    # A secret for this run; otherwise Ray writes one into the user's home folder.
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
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
    with (
        _own_sigterm(),
        mock.patch.object(parameter, "RayParams", parameters),
        mock.patch.object(services, "start_api_server", _no_api_server),
    ):
        ray.init(
            address="local",
            include_dashboard=False,
            log_to_driver=False,
            logging_level=_logging_level(log_level),
            object_store_memory=object_store_memory,
            _temp_dir=str(temp_dir),
            _system_config=dict(_SYSTEM_CONFIG),  # Ray writes into it, e.g. where it spills
        )


def _no_api_server(*_: Any, **__: Any) -> tuple[str, None]:
    """Start no API server: without a dashboard it only reports usage, and `ray.init` waits."""
    return "", None


def join_ray(address: str, log_level: str) -> None:
    """Join a Ray cluster, and send it this package and the user's modules."""
    _quiet()
    allowed = "null for a Ray of the run's own, or a cluster of which this machine is a node"
    try:
        if address != "auto":  # Ray itself would wait for minutes
            host, _, port = address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
        with _own_sigterm():
            ray.init(
                address=address,
                log_to_driver=False,
                logging_level=_logging_level(log_level),
                runtime_env={"py_modules": [str(PACKAGE), *_users_packages()]},
            )
    # Ray has no common class for: no cluster there, another version, no or a wrong token.
    except (RayError, OSError, RuntimeError, ValueError, AssertionError) as error:
        fail("ray.address", f"{address} given, and it cannot be joined: {error}", allowed)


def _users_packages() -> list[str]:
    """Return the files and packages that the roles may import of the user's code."""
    found: dict[str, None] = {}
    for name, path in user_modules(None).items():
        depth = len(Path(name).parts) - 1
        found[str(path.parents[depth - 1] if depth else path)] = None
    return list(found)


def _quiet() -> None:
    os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"  # `exit_code` shows each failure once
    # Ray prints a paragraph about every dead process, but the line of `note` is enough.
    ray_worker.print_to_stdstream = lambda message, *_, **__: _LOG.info("%s", message)


def _logging_level(log_level: str) -> int:
    return getattr(logging, "ERROR" if log_level == "WARNING" else log_level)


@contextlib.contextmanager
def _own_sigterm() -> Iterator[None]:
    """Context manager: keep this process's SIGTERM handler, which `ray.init` replaces."""
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit:  # of the SIGTERM handler that Ray sets
        signal.signal(signal.SIGTERM, on_sigterm)
        signal.raise_signal(signal.SIGTERM)
        raise
    finally:
        signal.signal(signal.SIGTERM, on_sigterm)


def objects_in_scope() -> int:
    """Return the number of Ray objects that this process still refers to."""
    core: Any = ray_worker.global_worker.core_worker  # pyright: ignore[reportAttributeAccessIssue]
    return len(core.get_all_reference_counts())
