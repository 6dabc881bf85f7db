"""Starts the processes of a run (Ray, and one per role), supervises and stops them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any

import psutil
import ray

from grpo_components.cluster.leftovers import make_temp_dir, remove_temp_dir, sweep
from grpo_components.cluster.ray_start import objects_in_scope, start_ray
from grpo_components.cluster.restarts import Family, RestartBudget
from grpo_components.cluster.role import Role
from grpo_components.cluster.role_host import RoleHost, resource_use
from grpo_components.cluster.role_parents import RoleParents
from grpo_components.cluster.supervision import apart, root_cause
from grpo_components.errors import RoleFailedError
from grpo_components.exchange.ledger import Ledger
from grpo_components.replay.event_order import EventOrder
from grpo_components.replay.recorded_run import available_cpus
from grpo_components.settings import Settings

_LOOPBACK_ONLY = {
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "VLLM_HOST_IP": "127.0.0.1",
}
"""Environment variables that keep the roles' libraries on loopback, unless the user sets them."""
_SHUTDOWN_KILL_S = 5.0
"""Seconds a stopped process may take to end before it is killed."""
_HEARTBEAT_EVERY_S = 5.0
_EARLY = ("torch", "torchtune", "torchrl")
"""What most roles import, less Ray and what imports it."""
_LOG = logging.getLogger("cluster")


class Cluster:
    """Starts, supervises and stops all processes of one run.

    Args:
        output_dir: folder of the run; logs go to its subfolder `logs`.
        log_level: logging level of Ray and of the roles.
        attempt: number of the run's attempt, from 0; each return to a checkpoint begins a new one.
        budget: restarts allowed; None allows none.
        heartbeat_s: seconds a role's heartbeat may be late before the role is restarted.
        note: function that shows a line to the user.
        phase: function that is called with the name of each phase that begins.
        events: event log; records restarts, and in a replay says when to restart which role.
        object_store_memory: bytes of shared memory for Ray's objects; more is spilled to disk.
            None lets Ray choose.
        early_threads: `cpu_threads` of most roles: a parent for them imports what they need while
            Ray starts. None starts each parent with its first role.
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
        phase: Callable[[str], None] = _LOG.info,
        events: EventOrder | None = None,
        object_store_memory: int | None = None,
        early_threads: int | None = None,
    ) -> None:
        self._logs, self._object_store_memory = output_dir / "logs", object_store_memory
        self._log_level, self._attempt, self._early_threads = log_level, attempt, early_threads
        self._budget = budget or RestartBudget(0, math.inf)
        self._heartbeat_s, self._events = heartbeat_s, events or EventOrder()
        self._note, self._phase = note, phase
        self._families: dict[str, Family] = {}
        self._names: dict[str, str] = {}
        self._starting: list[Role] = []
        self._last_failure = ""
        """Why the trainers were restarted last."""
        # Processes that `stop` must leave alone, e.g. a logger's service.
        self._not_ours = set(psutil.Process().children(recursive=True))
        self.roles: list[Role] = []
        self.temp_dir = make_temp_dir()
        self.rendezvous = self.temp_dir / "trainers"
        """File through which the trainer ranks find each other."""
        self._parents = RoleParents(self.temp_dir, self._logs / "role_parent.log", note)

    def start(self) -> None:
        """Start Ray on this machine, private to this run."""
        self._phase("starting Ray")
        if swept := sweep():
            self._note(f"removed what killed runs left behind: {', '.join(swept)}")
        if self._early_threads is not None:
            self._parents.start(_environment(self._early_threads), _EARLY)
        start_ray(self.temp_dir, self._log_level, self._object_store_memory)

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
        counts_restarts: bool = False,
        **kwargs: Any,
    ) -> Role:
        """Start the process of one role, without waiting for it; `ready` waits.

        Args:
            name: name of the role, e.g. generator_0; its family is `generator`.
            role_class: dotted path of the role's class, never imported in this process.
            cpu_threads: threads that torch may use in the process.
            num_gpus: number of GPUs, or the share of one.
            env: further environment variables of the process.
            min_living: give the role up if it cannot be restarted and at least this many others of
                its family are left; None never gives it up.
            restarts_alone: whether the other roles can go on while this one is restarted.
            remembers: method whose last successful call is repeated after a restart.
            counts_restarts: whether the class takes `restart_count`, the role's number of restarts.
            kwargs: arguments of the class.
        """
        log_file = str(self._logs / f"{name}.log")
        variables = _environment(cpu_threads) | (env or {})
        options: dict[str, Any] = {"num_cpus": 0, "num_gpus": num_gpus}
        identity = (name, self.temp_dir.name, log_file, self._log_level, cpu_threads, sys.path)

        def start_host(incarnation: int) -> tuple[Any, Any]:
            from_parent = self._parents.variables(role_class, variables, num_gpus)
            options["runtime_env"] = {"env_vars": variables | from_parent}
            host = ray.remote(RoleHost).options(**options).remote(*identity)
            count = {"restart_count": incarnation} if counts_restarts else {}
            return host, host.start.remote(role_class, kwargs | count)

        family = None
        if min_living is not None:
            family = self._families.setdefault(name.rpartition("_")[0], Family(min_living))
        role = Role(
            name,
            log_file,
            start_host,
            budget=self._budget,
            note=self._note,
            record=self._events.record,
            started=self._record_start,
            family=family,
            restarts_alone=restarts_alone,
            remembers=remembers,
            names=self._names,
        )
        self.roles.append(role)
        self._starting.append(role)
        return role

    async def ready(self, timeout_s: float) -> None:
        """Wait until every spawned role is built; show each, and record it in logs/roles.jsonl.

        A role whose process ends before that is restarted.

        Args:
            timeout_s: longest wait for each role, in seconds.

        Raises:
            RoleFailedError: a role cannot be built, or takes too long.
        """
        self._phase("starting roles")
        starting, self._starting = self._starting, []
        self._note(f"starting {', '.join(role.name for role in starting)} ...")
        together = {role for role in starting if not role.restarts_alone}
        alone = [self._ready(role, timeout_s) for role in starting if role.restarts_alone]
        await apart(_all([*alone, self._ready_together(together, timeout_s)]))

    async def _ready(self, role: Role, timeout_s: float) -> None:
        began = time.monotonic()
        await role.ready(timeout_s)
        self._note(f"{role.name} is ready after {time.monotonic() - began:.0f} s")

    async def _ready_together(self, starting: set[Role], timeout_s: float) -> None:
        try:
            await apart(_all(self._ready(role, timeout_s) for role in starting))
        except ExceptionGroup as failures:
            failure = root_cause(failures)
            if not isinstance(failure, RoleFailedError) or failure.kind != "died":
                raise
            await self._restart_together(failure, self._attempt)

    async def supervise(
        self, loops: Callable[[], Awaitable[None]], begin_again: Callable[[], Awaitable[None]]
    ) -> None:
        """Run the loops to their end, and restart roles that fail.

        A role with `restarts_alone` is restarted while the loops go on. If one without it fails,
        all roles without it are restarted together, and the loops start again.

        Args:
            loops: function that runs all loops of the recipe.
            begin_again: function called after the common restart; it brings everything else to a
                state from which the loops can start again.

        Raises:
            RoleFailedError: a role could not be restarted.
        """
        with (self._logs / "heartbeats.jsonl").open("a", encoding="utf-8") as file:

            def beat(role: str, use: dict[str, Any]) -> None:
                record = {"role": role, "attempt": self._attempt, "time": time.time(), **use}
                file.write(json.dumps(record) + "\n")
                file.flush()

            def beat_of_driver() -> None:
                beat("driver", resource_use() | {"objects": objects_in_scope()})

            async def watch_driver() -> None:
                while True:
                    beat_of_driver()
                    await asyncio.sleep(_HEARTBEAT_EVERY_S)

            async def attempt() -> None:
                async with asyncio.TaskGroup() as tasks:
                    watching = [tasks.create_task(watch_driver())]
                    for role in self.roles:
                        watch = role.watch(_HEARTBEAT_EVERY_S, self._heartbeat_s, beat)
                        watching.append(tasks.create_task(watch, name=f"watch {role.name}"))
                        watching.append(tasks.create_task(self._replay_restarts(role)))
                    await loops()
                    beat_of_driver()
                    for task in watching:
                        task.cancel()
                    last = (role.process_failure(_HEARTBEAT_EVERY_S, beat) for role in self.roles)
                    await asyncio.gather(*last)

            while True:
                try:
                    await apart(attempt())
                except ExceptionGroup as failures:
                    failure = root_cause(failures)
                    names = [role.name for role in self._restarted_together()]
                    if not isinstance(failure, RoleFailedError) or failure.role not in names:
                        raise
                    await self._restart_together(failure, self._attempt + 1)
                    await begin_again()
                else:
                    return

    def _restarted_together(self) -> list[Role]:
        return [role for role in self.roles if not role.restarts_alone]

    async def _restart_together(self, failure: RoleFailedError, attempt: int) -> None:
        roles = self._restarted_together()
        # Ranks that wait for a dead rank also fail, maybe before its death is noticed: look for it.
        checks = [role.process_failure(_HEARTBEAT_EVERY_S) for role in roles]
        found = [problem for problem in await asyncio.gather(*checks) if problem]
        failure = min(found, key=lambda problem: problem.kind != "died", default=failure)
        dead = [each.role for each in found if each.kind == "died" and each is not failure]
        others = "".join(f", {role} died, too" for role in dead)
        began, how = time.monotonic(), "restarting all trainers"
        rollback = attempt != self._attempt
        if rollback:
            how += f" from the last checkpoint, as attempt {attempt}"
        while True:
            repeated, self._last_failure = self._last_failure == failure.what, failure.what
            pause_s = self._budget.spend(failure, repeated=repeated)
            self._attempt = attempt
            event = "rollback" if rollback else "restart"
            self._events.note(event, role=failure.role, what=failure.what)
            self._note(f"{failure.role} {failure.what}{others}; {how} ({self._budget.used()})")
            others = ""
            for role in roles:
                role.kill()
            await asyncio.gather(*(role.wait_idle() for role in self.roles))
            self.rendezvous.unlink(missing_ok=True)
            await asyncio.sleep(pause_s)
            try:
                await apart(_all(role.begin_again() for role in roles))
            except ExceptionGroup as failures:
                again = root_cause(failures)
                if not isinstance(again, RoleFailedError):
                    raise
                failure = again
            else:
                self._note(f"the trainers are back after {time.monotonic() - began:.0f} s")
                return

    async def _replay_restarts(self, role: Role) -> None:
        while self._events.replaying and await self._events.wait_turn("restart", role=role.name):
            event = self._events.next_recorded(lambda event: event["event"] == "restart")
            assert event is not None, "it is its turn"
            await role.replay_restart(event["what"])

    def _record_start(self, role: str, identity: dict[str, Any]) -> None:
        record = {"role": role, **identity, "attempt": self._attempt, "started": time.time()}
        with (self._logs / "roles.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")

    async def close_roles(self, timeout_s: float) -> None:
        """Let every role stop its child processes, at the normal end of a run.

        Args:
            timeout_s: longest wait for each role, in seconds.
        """
        self._phase("closing roles")
        await apart(_all(role.close(timeout_s) for role in self.roles))

    def stop(self) -> None:
        """Kill every process of the run, whatever its state, and remove Ray's folder."""
        self._phase("stopping Ray and all processes")
        processes = set(psutil.Process().children(recursive=True)) - self._not_ours
        for role in self.roles:
            role.kill()
        self._parents.stop()
        try:
            ray.shutdown()
        finally:
            _, alive = psutil.wait_procs(processes, timeout=_SHUTDOWN_KILL_S)
            for process in alive:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(alive, timeout=_SHUTDOWN_KILL_S)
            remove_temp_dir(self.temp_dir)


async def _all(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    async with asyncio.TaskGroup() as tasks:
        for work in works:
            tasks.create_task(work)


def _environment(cpu_threads: int) -> dict[str, str]:
    return {
        "OMP_NUM_THREADS": str(cpu_threads),
        # Otherwise waiting threads spin, which slows down other roles on the same cores.
        "OMP_WAIT_POLICY": "PASSIVE",
        **{name: os.environ.get(name, value) for name, value in _LOOPBACK_ONLY.items()},
    }


def threads_of(cfg: Settings, role: str, num_references: int) -> int:
    """Return the threads that torch gets in each process of a role.

    Args:
        cfg: config, checked by preflight.
        role: trainer, generator, reference or reward_model.
        num_references: number of references that will be started.
    """
    num_reward_models = int(cfg.reward_model.path is not None)
    num_roles = cfg.num_generators + cfg.num_trainers + num_references + num_reward_models
    share = max(1, available_cpus(cfg.replay_events) // num_roles)
    return getattr(cfg.cpu_threads, role) or share


def build_cluster(
    cfg: Settings,
    needs_reference: bool,
    ledger: Ledger,
    note: Callable[[str], None],
    phase: Callable[[str], None],
) -> Cluster:
    """Build the cluster from the config.

    Args:
        cfg: config, checked by preflight.
        needs_reference: whether the run starts references.
        ledger: ledger (account of all groups) of the run; its event log records restarts.
        note: function that shows a line to the user.
        phase: function that is called with the name of each phase that begins.
    """
    threads = threads_of(cfg, "trainer", cfg.num_references * needs_reference)
    return Cluster(
        Path(cfg.output_dir),
        cfg.log_level,
        ledger.attempt,
        budget=RestartBudget(cfg.max_restarts, cfg.restart_window_s),
        heartbeat_s=cfg.timeouts.heartbeat_s,
        note=note,
        phase=phase,
        events=ledger.events,
        object_store_memory=cfg.object_store_memory,
        early_threads=threads if cfg.device == "cpu" else None,  # a GPU's roles are not forked
    )
