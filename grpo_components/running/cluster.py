"""Ray: one process per role, started together, watched, and stopped without leaving anything."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import json
import logging
import multiprocessing
import os
import re
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private import ray_constants
from ray.exceptions import RayActorError, RayError, RayTaskError

from grpo_components.running.quiet import quiet_libraries
from grpo_components.running.supervision import RoleFailedError

_LOOPBACK_ONLY = {
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "VLLM_HOST_IP": "127.0.0.1",
}
"""Where the roles' own libraries listen, unless the user's environment says otherwise."""
_SHUTDOWN_KILL_S = 5.0
"""How long stopped processes may take to be gone before they are killed."""


class RoleHost:
    """The Ray actor that holds one role, a plain class, in a process of its own.

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
        logging.basicConfig(level=log_level, force=True)
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
        return {"pid": os.getpid(), "node": ray.util.get_node_ip_address()}

    @contextlib.contextmanager
    def _named_failure(self, method: str) -> Iterator[None]:
        """Ray does not say whose code failed where the error travels through another role."""
        try:
            yield
        except Exception as error:  # whatever a role raises becomes its named failure
            logging.getLogger(self._name).exception("%s failed", method)
            what = f"failed: {type(error).__name__}: {error}"
            raise RoleFailedError(self._name, what, self._log_file) from error

    def _build(self, role_class: str, kwargs: dict[str, Any]) -> None:
        module, _, name = role_class.rpartition(".")
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

    async def until_dead(self) -> None:
        """Never returns: the caller learns of this process's death at once."""
        await asyncio.Event().wait()


class Role:
    """The driver's handle of one role.

    Args:
        name: of the role.
        host: its Ray actor.
        log_file: its log.
    """

    def __init__(self, name: str, host: Any, log_file: str) -> None:
        self.name, self._host, self._log_file = name, host, log_file

    def submit(self, method: str, *args: Any, num_returns: int = 1, lane: str = "main") -> Any:
        """Start a call without waiting for it.

        Args:
            method: of the role.
            args: for it; references at top level arrive as their values, so that what one role
                returned goes to another without passing through the driver.
            num_returns: parts of the returned tuple to have references of.
            lane: thread for a blocking method; another lane runs beside the main one.

        Returns:
            A reference, or a list of `num_returns`.
        """
        return self._host.call.options(num_returns=num_returns).remote(method, lane, *args)

    async def result(self, reference: Awaitable[Any], what: str, timeout_s: float) -> Any:
        """Wait for a call's result.

        Raises:
            RoleFailedError: naming the role whose code failed, or that did not answer in time.
        """
        # asyncio.wait_for swallows a cancellation that comes with the result (Python 3.11).
        try:
            async with asyncio.timeout(timeout_s):
                return await reference
        except TimeoutError:
            raise RoleFailedError(
                self.name, f"did not answer {what} within {timeout_s:g} s", self._log_file
            ) from None
        except RayError as error:
            raise self._failure(error, what) from error

    async def call(self, method: str, *args: Any, timeout_s: float, lane: str = "main") -> Any:
        """Call a method and wait for its result; see `submit` and `result`."""
        return await self.result(self.submit(method, *args, lane=lane), method, timeout_s)

    async def close(self, timeout_s: float) -> None:
        """Let the role end its own processes."""
        await self.result(self._host.close.remote(), "close", timeout_s)

    async def watch(self) -> None:
        """Wait for ever; raises RoleFailedError as soon as the role's process is gone."""
        try:
            await self._host.until_dead.remote()
        except RayError as error:
            raise self._failure(error, "lives") from error

    def _failure(self, error: RayError, what: str) -> RoleFailedError:
        cause: Any = error
        while isinstance(cause, RayTaskError):
            cause = cause.cause
        if isinstance(cause, RoleFailedError):
            return cause
        if isinstance(error, RayActorError):
            return RoleFailedError(self.name, f"died: {_cause_of_death(error)}", self._log_file)
        return RoleFailedError(self.name, f"failed in {what}: {error}", self._log_file)


def _cause_of_death(error: RayActorError) -> str:
    """What Ray knows of it: the kind of exit, and its first words on why."""
    told = " ".join(str(error).split())
    found = re.search(r"exit type: (\w+) Worker exit detail: (.+?\.)( |$)", told)
    if found is None:
        return told
    hint = " Killed, out of memory, or crashed?" if found[1] == "SYSTEM_ERROR" else ""
    return f"{found[1]}: {found[2]}{hint}"


class Cluster:
    """All processes of one run.

    Args:
        output_dir: of the run; logs go to its logs folder.
        log_level: of Ray and of the roles.
        attempt: which life of the run.
        object_store_memory: bytes of shared memory for objects; more is spilled to Ray's folder.
            None leaves it to Ray.
    """

    def __init__(
        self,
        output_dir: Path,
        log_level: str,
        attempt: int,
        object_store_memory: int | None = None,
    ) -> None:
        self._logs, self._object_store_memory = output_dir / "logs", object_store_memory
        self._log_level, self._attempt = log_level, attempt
        self._starting: list[tuple[Role, Any]] = []
        self._hosts: dict[str, Any] = {}
        self._not_ours = set(psutil.Process().children(recursive=True))  # e.g. a logger's service
        self.roles: list[Role] = []
        # Unix socket paths are limited to 107 bytes, so that Ray's folder must have a short name.
        self.temp_dir = Path(tempfile.mkdtemp(prefix="grpo-", dir="/tmp"))

    def start(self) -> None:
        """Start Ray on this machine, private to this run."""
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"  # each failure is told once, by `exit_code`
        os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
        # A secret of this run only; Ray would write one into the user's home.
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        # Ray has no other switch that makes all of its processes listen on loopback only.
        ray_constants.ENABLE_RAY_CLUSTER = False
        on_sigterm = signal.getsignal(signal.SIGTERM)
        ray.init(
            address="local",
            include_dashboard=False,
            log_to_driver=False,
            logging_level=getattr(
                logging, "ERROR" if self._log_level == "WARNING" else self._log_level
            ),
            object_store_memory=self._object_store_memory,
            _temp_dir=str(self.temp_dir),
        )
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray has put its own there, which exits

    def spawn(
        self,
        name: str,
        role_class: str,
        *,
        cpu_threads: int = 1,
        num_gpus: float = 0,
        env: dict[str, str] | None = None,
        **kwargs: Any,
    ) -> Role:
        """Start one role's process; returns at once, `ready` waits.

        Args:
            name: of the role.
            role_class: dotted path of its class, imported in its own process only.
            cpu_threads: threads that torch may use there.
            num_gpus: GPUs, or a share of one.
            env: environment variables.
            kwargs: of the class.
        """
        log_file = str(self._logs / f"{name}.log")
        variables = {
            "OMP_NUM_THREADS": str(cpu_threads),
            # Threads that spin while they wait slow everyone down where roles share cores.
            "OMP_WAIT_POLICY": "PASSIVE",
            **{name: os.environ.get(name, value) for name, value in _LOOPBACK_ONLY.items()},
            **(env or {}),
        }
        host = (
            ray.remote(RoleHost)
            .options(
                name=name,
                num_cpus=0,
                num_gpus=num_gpus,
                runtime_env={"env_vars": variables},
            )
            .remote(name, self.temp_dir.name, log_file, self._log_level, cpu_threads, sys.path)
        )
        role = Role(name, host, log_file)
        self._hosts[name] = host
        self._starting.append((role, host.start.remote(role_class, kwargs)))
        return role

    async def ready(self, timeout_s: float) -> None:
        """Wait until every spawned role is built; record each in logs/roles.jsonl.

        Raises:
            RoleFailedError: naming the first role that failed or took too long.
        """
        starting, self._starting = self._starting, []

        async def one(role: Role, reference: Any) -> None:
            identity = await role.result(reference, "its start", timeout_s)
            record = {"role": role.name, **identity, "attempt": self._attempt}
            with (self._logs / "roles.jsonl").open("a") as file:
                file.write(json.dumps({**record, "started": time.time()}) + "\n")
            self.roles.append(role)

        async with asyncio.TaskGroup() as tasks:
            for role, reference in starting:
                tasks.create_task(one(role, reference))

    async def watch(self) -> None:
        """Wait for ever; raises RoleFailedError as soon as any role's process is gone."""
        async with asyncio.TaskGroup() as tasks:
            for role in self.roles:
                tasks.create_task(role.watch(), name=f"watch {role.name}")

    async def close_roles(self, timeout_s: float) -> None:
        """Let every role end its own processes; the normal end of a run."""
        async with asyncio.TaskGroup() as tasks:
            for role in self.roles:
                tasks.create_task(role.close(timeout_s))

    def stop(self) -> None:
        """End every process of the run and remove Ray's folder, whatever state they are in."""
        processes = set(psutil.Process().children(recursive=True)) - self._not_ours
        with contextlib.suppress(RayError):  # a host that is gone already, or Ray itself
            for host in self._hosts.values():
                ray.kill(host)
        try:
            ray.shutdown()
        finally:
            _, alive = psutil.wait_procs(processes, timeout=_SHUTDOWN_KILL_S)
            for process in alive:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(alive, timeout=_SHUTDOWN_KILL_S)
            for semaphore in Path("/dev/shm").glob(f"sem.{self.temp_dir.name}-*"):
                semaphore.unlink(missing_ok=True)
            shutil.rmtree(self.temp_dir, ignore_errors=True)


def engine_environment(device: str, log_level: str, kv_cache_gib: int) -> dict[str, str]:
    """Environment variables that vLLM reads when its module is imported.

    Args:
        device: cpu or cuda.
        log_level: of vLLM.
        kv_cache_gib: memory for the KV cache on a CPU, in GiB.
    """
    variables = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": log_level if log_level != "WARNING" else "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if device == "cpu":
        # Without dynamo the sampler is not compiled, which costs seconds at the first logprobs.
        variables |= {"VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gib), "TORCHDYNAMO_DISABLE": "1"}
    return variables
