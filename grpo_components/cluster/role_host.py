"""The process of one role: builds the role, runs its methods and answers heartbeats."""

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
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import ray

from grpo_components.cluster.ray_cluster import this_node
from grpo_components.errors import ConfigError, RoleFailedError
from grpo_components.plain_text import PlainFormatter
from grpo_components.quiet import quiet_libraries
from grpo_components.rendezvous import Rendezvous, open_rendezvous
from grpo_components.time_use import IDLE, STARTING, TimeUse

DUMP_STACKS = signal.SIGUSR1
"""Signal that makes a role's process write the stacks of all its threads to its log."""
_MAIN_LANE = "main"


class RoleHost:
    """Ray actor that runs one role, a plain class, in its own process."""

    def __init__(
        self,
        name: str,
        log_file: str,
        scratch: str,
        log_level: str,
        cpu_threads: int,
        variables: dict[str, str],
        module_path: list[str],
    ) -> None:
        gc.disable()  # saves a fifth of the import time; arguments of `start` import nearly all
        # Libraries read these variables when they are loaded; no library of the roles is yet.
        os.environ["OMP_NUM_THREADS"] = str(cpu_threads)
        # Otherwise waiting threads spin, which slows down other roles on the same cores.
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.environ |= variables
        self._name, self._log_file = name, log_file
        Path(scratch).mkdir(mode=0o700, exist_ok=True)
        os.environ["TMPDIR"] = scratch
        tempfile.tempdir = None  # Python keeps the folder that it found first
        # A killed process leaves its semaphores in /dev/shm; the prefix tells which run's they are.
        semaphores = f"/{Path(scratch).name}"
        multiprocessing.current_process()._config["semprefix"] = semaphores  # pyright: ignore
        descriptor = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        faulthandler.register(DUMP_STACKS, file=2, all_threads=True)
        logging.basicConfig(level=log_level, force=True)
        logging.getLogger().handlers[0].setFormatter(PlainFormatter(logging.BASIC_FORMAT))
        quiet_libraries(log_level)
        sys.path += [folder for folder in module_path if folder not in sys.path]
        for variable, value in network_environment(ray.util.get_node_ip_address()).items():
            os.environ.setdefault(variable, value)
        self._cpu_threads, self._rendezvous = cpu_threads, None
        self._role: Any = None
        self._time_use, self._running = TimeUse(STARTING), dict[object, tuple[str, str]]()
        self._lanes: dict[str, ThreadPoolExecutor] = {}

    def __repr__(self) -> str:  # Ray shows it in every error
        return self._name

    def open_rendezvous(self) -> Rendezvous:
        """Open a port on this node's address in Ray, for the other ranks of this kind of role."""
        self._rendezvous = open_rendezvous(ray.util.get_node_ip_address())
        return self._rendezvous

    def gpus(self) -> str:
        """Return the GPUs that Ray gave this process, in the form of CUDA_VISIBLE_DEVICES."""
        return os.environ["CUDA_VISIBLE_DEVICES"]

    def use_gpus(self, *gpus: str) -> None:
        """Use the GPUs of other roles.

        Must come before `start`: the arguments of `start` import torchtune, which starts CUDA.
        """
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)

    async def start(
        self,
        role_class: str,
        kwargs: dict[str, Any],
        rendezvous: Rendezvous | None = None,
        gpus_in_use: None = None,
    ) -> dict[str, Any]:
        """Build the role; return this process's pid, node (host name), node_id and tmp (folder).

        `gpus_in_use`: reference to the result of `use_gpus`, if called; Ray waits for it.
        """
        if rendezvous is not None:
            others = replace(rendezvous, listener=None)  # a descriptor is rank 0's own
            kwargs |= {"rendezvous": self._rendezvous or others}
        with named_failure(self._name, self._log_file, "start"):
            await self._in_lane(_MAIN_LANE, self._build, role_class, kwargs)
        self._time_use.begin(IDLE)
        return {
            "pid": os.getpid(),
            "node": socket.gethostname(),
            "node_id": this_node(),
            "tmp": tempfile.gettempdir(),
        }

    def _build(self, role_class: str, kwargs: dict[str, Any]) -> None:
        module, _, name = role_class.rpartition(".")
        cls = getattr(importlib.import_module(module), name)
        gc.freeze()
        gc.enable()
        if "torch" in sys.modules:
            import torch

            torch.set_num_threads(self._cpu_threads)
            # cuDNN plans each new shape for 120 ms, and nearly every batch has one.
            torch.backends.cuda.enable_cudnn_sdp(False)
        self._role = cls(**kwargs)

    async def call(self, method: str, lane: str, *args: Any) -> Any:
        """Run a method of the role: in the thread `lane`, or in the event loop if it is async."""
        with named_failure(self._name, self._log_file, method), self._timed(method, lane):
            function = getattr(self._role, method)
            if inspect.iscoroutinefunction(function):
                return await function(*args)
            return await self._in_lane(lane, function, *args)

    @contextlib.contextmanager
    def _timed(self, method: str, lane: str) -> Iterator[None]:
        """Context manager: count time for this method, unless thread `main` runs another."""
        call = object()
        self._running[call] = lane, method
        self._time_use.begin(self._activity())
        try:
            yield
        finally:
            del self._running[call]
            self._time_use.begin(self._activity())

    def _activity(self) -> str:
        calls = sorted(self._running.values(), key=lambda call: call[0] != _MAIN_LANE)
        return calls[0][1] if calls else IDLE

    async def _in_lane(self, lane: str, function: Any, *args: Any) -> Any:
        if lane not in self._lanes:
            self._lanes[lane] = ThreadPoolExecutor(1, thread_name_prefix=lane)
        return await asyncio.get_running_loop().run_in_executor(self._lanes[lane], function, *args)

    async def close(self) -> None:
        """Let the role stop its child processes, if it has any, before this process is ended."""
        if hasattr(self._role, "close"):
            with _collect_does_nothing():
                await self._in_lane(_MAIN_LANE, self._role.close)

    async def heartbeat(self, interval_s: float) -> dict[str, Any]:
        """Return resource and time use after an interval; silence means a dead or hung process."""
        await asyncio.sleep(interval_s)
        use = self._time_use.totals()
        more: dict[str, Any] = {}
        if hasattr(self._role, "time_use"):  # the role knows better than its calls
            more = self._role.time_use()
            use = {kind: {STARTING: use[kind][STARTING], **more[kind]} for kind in use}
        rounded = {
            kind: {activity: round(value, 3) for activity, value in by_activity.items()}
            for kind, by_activity in use.items()
        }
        return resource_use() | more | rounded


@contextlib.contextmanager
def named_failure(role: str, log_file: str, method: str) -> Iterator[None]:
    """Context manager: turn every error into a `RoleFailedError`, which names the role."""
    try:
        yield
    except (KeyboardInterrupt, GeneratorExit, asyncio.CancelledError):
        raise
    except BaseException as error:  # `sys.exit` and DCP's errors would end the process silently
        logging.getLogger(role).exception("%s failed", method)
        what = f"failed: {type(error).__name__}: {error}"
        kind = "waited" if isinstance(error, TimeoutError) else "raised"
        if isinstance(error, ConfigError):
            what, kind = str(error), "refused"
        raise RoleFailedError(role, what, log_file, kind) from error


@contextlib.contextmanager
def _collect_does_nothing() -> Iterator[None]:
    """Context manager: skip garbage collection in vLLM's shutdown, which takes a second."""
    collect = gc.collect
    gc.collect = lambda generation=2: 0
    try:
        yield
    finally:
        gc.collect = collect


def resource_use() -> dict[str, Any]:
    """Measure this process's memory (MiB), CPU seconds, threads, open files and child processes."""
    process = psutil.Process()
    with process.oneshot():
        memory = process.memory_info()
        shared = getattr(memory, "shared", 0)  # Ray's object store; macOS does not tell
        return {
            "rss_mib": round((memory.rss - shared) / 2**20, 1),
            "cpu_s": round(time.process_time(), 3),
            "threads": process.num_threads(),
            "open_files": process.num_fds(),
            "processes": len(process.children(recursive=True)),
        }


def network_environment(address: str) -> dict[str, str]:
    """Return environment variables that make gloo, NCCL and vLLM use the interface of `address`.

    Without them, each picks an interface by itself, maybe one that other nodes cannot reach.
    """
    for name, addresses in psutil.net_if_addrs().items():
        if address in (each.address for each in addresses):
            return {
                "GLOO_SOCKET_IFNAME": name,
                "NCCL_SOCKET_IFNAME": f"={name}",  # without it, eth1 would also name eth10
                "VLLM_HOST_IP": address,
            }
    return {}
