"""Ray: one process per role, started together, supervised, and stopped without remains."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private import ray_constants
from ray._private import worker as ray_worker

from grpo_components.cluster.restarts import RestartBudget
from grpo_components.cluster.role import Family, Role
from grpo_components.cluster.role_host import RoleHost, resource_use
from grpo_components.cluster.supervision import root_cause
from grpo_components.errors import RoleFailedError
from grpo_components.exchange.ledger import Ledger
from grpo_components.replay.event_order import Turns
from grpo_components.settings import Settings

_LOOPBACK_ONLY = {
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "VLLM_HOST_IP": "127.0.0.1",
}
"""Where the roles' own libraries listen, unless the user's environment says otherwise."""
_SHUTDOWN_KILL_S = 5.0
"""How long stopped processes may take to be gone before they are killed."""
_HEARTBEAT_EVERY_S = 5.0
_LOG = logging.getLogger("cluster")


def _objects_in_scope() -> int:
    """Objects of Ray's that this process still refers to."""
    core: Any = ray_worker.global_worker.core_worker  # pyright: ignore[reportAttributeAccessIssue]
    return len(core.get_all_reference_counts())


def _log_only(message: dict[str, Any], *_: Any, **__: Any) -> None:
    _LOG.info("%s", message)


class Cluster:
    """All processes of one run.

    Args:
        output_dir: of the run; logs go to its logs folder.
        log_level: of Ray and of the roles.
        attempt: which life of the run.
        budget: of restarts; none are allowed without one.
        heartbeat_s: how late a role's sign of life may be.
        note: told of restarts, in words.
        turns: told of restarts; those of a replayed run happen again in their turn.
        object_store_memory: bytes of shared memory for objects; more is spilled to Ray's folder.
            None leaves it to Ray.
    """

    def __init__(
        self,
        output_dir: Path,
        log_level: str,
        attempt: int,
        *,
        budget: RestartBudget | None = None,
        heartbeat_s: float = 60.0,
        note: Callable[[str], None] = _LOG.warning,
        turns: Turns | None = None,
        object_store_memory: int | None = None,
    ) -> None:
        self._logs, self._object_store_memory = output_dir / "logs", object_store_memory
        self._log_level, self._attempt = log_level, attempt
        self._budget = budget or RestartBudget(0, math.inf)
        self._heartbeat_s, self._note, self._turns = heartbeat_s, note, turns or Turns()
        self._families: dict[str, Family] = {}
        self._names: dict[str, str] = {}
        self._starting: list[Role] = []
        self._together: list[Role] = []
        self._raised = ""
        self._not_ours = set(psutil.Process().children(recursive=True))  # e.g. a logger's service
        self.roles: list[Role] = []
        # Unix socket paths are limited to 107 bytes, so that Ray's folder must have a short name.
        self.temp_dir = Path(tempfile.mkdtemp(prefix=f"grpo-{os.getpid()}-", dir="/tmp"))
        self.rendezvous = self.temp_dir / "trainers"
        """File through which the trainer ranks find each other."""

    def start(self) -> None:
        """Start Ray on this machine, private to this run."""
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"  # each failure is told once, by `exit_code`
        os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
        # A secret of this run only; Ray would write one into the user's home.
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        # Ray would print a paragraph on every death, beside our own line.
        ray_worker.print_to_stdstream = _log_only
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
        min_living: int | None = None,
        restarts_alone: bool = True,
        remembers: str | None = None,
        numbered_lives: bool = False,
        **kwargs: Any,
    ) -> Role:
        """Start one role's process; returns at once, `ready` waits.

        Args:
            name: of the role, e.g. generator_0; all generators are one family.
            role_class: dotted path of its class, imported in its own process only.
            cpu_threads: threads that torch may use there.
            num_gpus: GPUs, or a share of one.
            env: environment variables.
            min_living: with so many others of its family left, it can be given up.
            restarts_alone: whether the others can go on while it is restarted.
            remembers: the last call of this method is made again after a restart.
            numbered_lives: the class is told which life of its process it is, as `life`.
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
        options = {"num_cpus": 0, "num_gpus": num_gpus, "runtime_env": {"env_vars": variables}}
        identity = (name, self.temp_dir.name, log_file, self._log_level, cpu_threads, sys.path)

        def start_host(life: int) -> tuple[Any, Any]:
            host = ray.remote(RoleHost).options(**options).remote(*identity)
            numbered = {"life": life} if numbered_lives else {}
            return host, host.start.remote(role_class, kwargs | numbered)

        family = None
        if min_living is not None:
            family = self._families.setdefault(name.rpartition("_")[0], Family(min_living))
        role = Role(
            name,
            log_file,
            start_host,
            budget=self._budget,
            note=self._note,
            record=self._turns.happened,
            started=self._started,
            family=family,
            restarts_alone=restarts_alone,
            remembers=remembers,
            names=self._names,
        )
        self.roles.append(role)
        self._starting.append(role)
        if not restarts_alone:
            self._together.append(role)
        return role

    async def ready(self, timeout_s: float) -> None:
        """Wait until every spawned role is built; each is recorded in logs/roles.jsonl.

        Roles whose process ends meanwhile are started again.

        Raises:
            RoleFailedError: naming the first role that failed or took too long.
        """
        starting, self._starting = self._starting, []
        alone = [role for role in starting if role not in self._together]
        async with asyncio.TaskGroup() as tasks:
            for role in alone:
                tasks.create_task(role.ready(timeout_s))
            tasks.create_task(self._ready_together(set(starting) - set(alone), timeout_s))

    async def _ready_together(self, starting: set[Role], timeout_s: float) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                for role in starting:
                    tasks.create_task(role.ready(timeout_s))
        except ExceptionGroup as failures:
            failure = root_cause(failures)
            if not isinstance(failure, RoleFailedError) or failure.kind != "died":
                raise
            await self._restart_together(failure, self._attempt)

    async def supervise(
        self, loops: Callable[[], Awaitable[None]], begin_again: Callable[[], Awaitable[None]]
    ) -> None:
        """Run the loops to their end, and restart what fails meanwhile.

        A role that restarts alone does so while the loops go on. Roles that do not are restarted
        all of them, and the loops with them.

        Args:
            loops: of the recipe.
            begin_again: brings everything else to where the loops can start anew; the roles that
                failed together are new.

        Raises:
            RoleFailedError: naming the role that could not be restarted.
        """
        with (self._logs / "heartbeats.jsonl").open("a", encoding="utf-8") as file:

            def beat(role: str, use: dict[str, Any]) -> None:
                record = {"role": role, "attempt": self._attempt, "time": time.time(), **use}
                file.write(json.dumps(record) + "\n")
                file.flush()

            async def watch_driver() -> None:
                while True:
                    beat("driver", resource_use() | {"objects": _objects_in_scope()})
                    await asyncio.sleep(_HEARTBEAT_EVERY_S)

            while True:
                try:
                    async with asyncio.TaskGroup() as tasks:
                        watching = [tasks.create_task(watch_driver())]
                        for role in self.roles:
                            watch = role.watch(_HEARTBEAT_EVERY_S, self._heartbeat_s, beat)
                            watching.append(tasks.create_task(watch, name=f"watch {role.name}"))
                            watching.append(tasks.create_task(self._replay_restarts(role)))
                        await loops()
                        for task in watching:
                            task.cancel()
                except ExceptionGroup as failures:
                    failure = root_cause(failures)
                    names = [role.name for role in self._together]
                    if not isinstance(failure, RoleFailedError) or failure.role not in names:
                        raise
                    await self._restart_together(failure, self._attempt + 1)
                    await begin_again()
                else:
                    return

    async def _restart_together(self, failure: RoleFailedError, attempt: int) -> None:
        # Ranks that waited for a dead one fail too, and may have been heard first.
        causes = [role.cause_of_failure(_HEARTBEAT_EVERY_S) for role in self._together]
        found = [cause for cause in await asyncio.gather(*causes) if cause]
        failure = min(found, key=lambda cause: cause.kind != "died", default=failure)
        began, how = time.monotonic(), "all trainers start again"
        rollback = attempt != self._attempt
        if rollback:
            how += f" at the last checkpoint, as attempt {attempt}"
        while True:
            repeated, self._raised = self._raised == failure.what, failure.what
            pause_s = self._budget.spend(failure, repeated=repeated)
            self._attempt = attempt
            event = "rollback" if rollback else "restart"
            self._turns.note(event, role=failure.role, what=failure.what)
            self._note(f"{failure.role} {failure.what}; {how} ({self._budget.used()})")
            for role in self._together:
                role.kill()
            await asyncio.gather(*(role.settled() for role in self.roles))
            self.rendezvous.unlink(missing_ok=True)
            await asyncio.sleep(pause_s)
            try:
                async with asyncio.TaskGroup() as tasks:
                    for role in self._together:
                        tasks.create_task(role.begin_again())
            except ExceptionGroup as failures:
                again = root_cause(failures)
                if not isinstance(again, RoleFailedError):
                    raise
                failure = again
            else:
                self._note(f"the trainers are back after {time.monotonic() - began:.0f} s")
                return

    async def _replay_restarts(self, role: Role) -> None:
        while self._turns.replaying and await self._turns.turn("restart", role=role.name):
            event = self._turns.upcoming(lambda event: event["event"] == "restart")
            assert event is not None, "it is its turn"
            await role.restart_as(event["what"])

    def _started(self, role: str, identity: dict[str, Any]) -> None:
        record = {"role": role, **identity, "attempt": self._attempt, "started": time.time()}
        with (self._logs / "roles.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")

    async def close_roles(self, timeout_s: float) -> None:
        """Let every role end its own processes; the normal end of a run."""
        async with asyncio.TaskGroup() as tasks:
            for role in self.roles:
                tasks.create_task(role.close(timeout_s))

    def stop(self) -> None:
        """End every process of the run and remove Ray's folder, whatever state they are in."""
        processes = set(psutil.Process().children(recursive=True)) - self._not_ours
        for role in self.roles:
            role.kill()
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


def build_cluster(cfg: Settings, ledger: Ledger, note: Callable[[str], None]) -> Cluster:
    """The cluster that a config asks for.

    Args:
        cfg: checked by preflight.
        ledger: of the run; its event order records restarts.
        note: shows a line.
    """
    return Cluster(
        Path(cfg.output_dir),
        cfg.log_level,
        ledger.attempt,
        budget=RestartBudget(cfg.max_restarts, cfg.restart_window_s),
        heartbeat_s=cfg.timeouts.heartbeat_s,
        note=note,
        turns=ledger.turns,
        object_store_memory=cfg.object_store_memory,
    )


def engine_environment(device: str, log_level: str, kv_cache_gib: int) -> dict[str, str]:
    """Environment variables that vLLM reads when its module is imported.

    Args:
        device: cpu or cuda.
        log_level: of vLLM.
        kv_cache_gib: memory for the KV cache on a CPU, in GiB.
    """
    variables = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": log_level,
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if device == "cpu":
        # Without dynamo the sampler is not compiled, which costs seconds at the first logprobs.
        variables |= {"VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gib), "TORCHDYNAMO_DISABLE": "1"}
    return variables
