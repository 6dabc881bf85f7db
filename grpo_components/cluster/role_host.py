"""The process that holds one role: it builds it, runs its methods in lanes, and shows it lives."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import importlib
import inspect
import logging
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil

from grpo_components.errors import RoleFailedError
from grpo_components.objective.component_errors import ComponentError
from grpo_components.plain_text import PlainFormatter
from grpo_components.quiet import quiet_libraries

DUMP_STACKS = signal.SIGUSR1
"""A role's process that gets it writes the stacks of all its threads to its log."""


class RoleHost:
    """Holds one role, a plain class, in a process of its own.

    Args:
        name: of the role, e.g. generator_0.
        run_name: unique on this machine.
        log_file: stdout and stderr of the process go there.
        log_level: of Python's logging.
        cpu_threads: threads that torch may use.
        module_path: the driver's sys.path, so that modules beside the config are found here too.
    """

    def __init__(
        self,
        name: str,
        run_name: str,
        log_file: str,
        log_level: str,
        cpu_threads: int,
        module_path: list[str],
    ) -> None:
        self._name, self._log_file = name, log_file
        # A killed process leaves its semaphores in /dev/shm: this run's are found by their name.
        multiprocessing.current_process()._config["semprefix"] = f"/{run_name}"  # pyright: ignore
        descriptor = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        faulthandler.register(DUMP_STACKS, file=2, all_threads=True)
        logging.basicConfig(level=log_level, force=True)
        logging.getLogger().handlers[0].setFormatter(PlainFormatter(logging.BASIC_FORMAT))
        quiet_libraries(log_level)
        sys.path += [folder for folder in module_path if folder not in sys.path]
        self._cpu_threads = cpu_threads
        self._role: Any = None
        self._lanes: dict[str, ThreadPoolExecutor] = {}

    def __repr__(self) -> str:  # Ray writes it into every error
        return self._name

    async def start(self, role_class: str, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Build the role from its dotted path; returns pid and node."""
        with self._named_failure("start"):
            await self._in_lane("main", self._build, role_class, kwargs)
        return {"pid": os.getpid(), "node": socket.gethostname()}

    @contextlib.contextmanager
    def _named_failure(self, method: str) -> Iterator[None]:
        """Ray does not say whose code failed where the error travels through another role."""
        try:
            yield
        # Whatever a role raises becomes its named failure; `sys.exit` would end it without a word.
        except (Exception, SystemExit) as error:
            logging.getLogger(self._name).exception("%s failed", method)
            what = f"failed: {type(error).__name__}: {error}"
            kind = "waited" if isinstance(error, TimeoutError) else "raised"
            if isinstance(error, ComponentError):
                what, kind = str(error), "refused"
            raise RoleFailedError(self._name, what, self._log_file, kind) from error

    def _build(self, role_class: str, kwargs: dict[str, Any]) -> None:
        module, _, name = role_class.rpartition(".")
        with _no_collection():
            cls = getattr(importlib.import_module(module), name)
        if "torch" in sys.modules:
            import torch

            torch.set_num_threads(self._cpu_threads)
        self._role = cls(**kwargs)

    async def call(self, method: str, lane: str, *args: Any) -> Any:
        """Call one method of the role; blocking ones run one at a time in their lane's thread."""
        function = getattr(self._role, method)
        with self._named_failure(method):
            if inspect.iscoroutinefunction(function):
                return await function(*args)
            return await self._in_lane(lane, function, *args)

    async def _in_lane(self, lane: str, function: Any, *args: Any) -> Any:
        if lane not in self._lanes:
            self._lanes[lane] = ThreadPoolExecutor(1, thread_name_prefix=lane)
        return await asyncio.get_running_loop().run_in_executor(self._lanes[lane], function, *args)

    async def close(self) -> None:
        """Let the role end its own processes, where it has any."""
        if hasattr(self._role, "close"):
            await self._in_lane("main", self._role.close)

    async def heartbeat(self, interval_s: float) -> dict[str, Any]:
        """Answer after an interval: the caller learns of this process's death or silence.

        Returns:
            What it uses: `rss_mib`, `threads`, `open_files`, and `processes` with its children.
        """
        await asyncio.sleep(interval_s)
        return resource_use()


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Imports leave no garbage: looking for some takes a fifth of their time, now and later."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def resource_use() -> dict[str, Any]:
    """What this process uses: memory of its own in MiB, threads, open files, child processes."""
    process = psutil.Process()
    with process.oneshot():
        memory = process.memory_info()
        return {
            "rss_mib": round((memory.rss - memory.shared) / 2**20, 1),  # Ray's store is shared
            "threads": process.num_threads(),
            "open_files": process.num_fds(),
            "processes": len(process.children(recursive=True)),
        }
