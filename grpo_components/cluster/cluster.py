"""Starts the processes of a run (Ray, and one per role), supervises and stops them."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray._private import worker as ray_worker

from grpo_components.cluster.ray_cluster import RayCluster, family_of
from grpo_components.cluster.role import RestartBudget, Role
from grpo_components.cluster.role_host import RoleHost, resource_use
from grpo_components.cluster.role_process import RoleProcess
from grpo_components.cluster.supervision import apart, root_cause
from grpo_components.errors import ReplayStop, RoleFailedError
from grpo_components.exchange.ledger import Ledger
from grpo_components.files import append_record
from grpo_components.settings import Settings

_HEARTBEAT_EVERY_S = 5.0


class Cluster:
    """Starts, supervises and stops all processes of one run."""

    def __init__(
        self,
        cfg: Settings,
        ledger: Ledger,
        note: Callable[[str], None],
        phase: Callable[[str], None],
    ) -> None:
        self._cfg, self._ledger, self.note, self._phase = cfg, ledger, note, phase
        self._events, self._attempt = ledger.events, ledger.attempt
        self._logs = Path(cfg.output_dir).absolute() / "logs"
        self._budget = RestartBudget(cfg.max_restarts, cfg.restart_window_s)
        self._names: dict[str, str] = {}
        self._recover: Callable[[str], Awaitable[None]] | None = None
        self._starting: list[Role] = []
        self._last_failure = "", 0
        """Why the trainers were last restarted, and how many training steps were done by then."""
        self.roles: list[Role] = []
        self._rendezvous: dict[str, Any] = {}
        """Kind of role (`trainer`) -> Ray reference to the address where its ranks meet."""
        self._gpus: dict[str, Any] = {}
        """Name of a role whose GPUs another role shares -> Ray reference to these GPUs."""
        self.ray = RayCluster(cfg, note)
        self._joined = cfg.ray.address is not None
        self.scratch = self.ray.scratch
        """Folder for temporary files, on every node; removed at the end."""

    def start(self) -> None:
        """Start Ray on this machine for this run only, or join an existing Ray cluster."""
        self._phase("joining the Ray cluster" if self._joined else "starting Ray")
        self.ray.start()

    def _why_no_room(self) -> str:
        living = [role.name for role in self.roles if not role.lost]
        return self.ray.why_no_room(living)

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
        pause: Callable[[str, float], Awaitable[None]] | None = None,
        counts_restarts: bool = False,
        meets: bool = False,
        beside: Sequence[str] = (),
        **kwargs: Any,
    ) -> Role:
        """Start the process of one role, without waiting for it; `ready` waits.

        Args:
            min_living: if this role fails for good, the run goes on while at least this many other
                roles of its kind live; None: the run ends.
            counts_restarts: whether the role's class takes the argument `restart_count`.
            meets: whether the role's class takes `rendezvous`, the address where its ranks meet.
            beside: names of the roles whose GPUs this role shares.
        """
        log_file = str(self._logs / f"{name}.log")
        level, scratch = self._cfg.log_level, str(self.scratch)
        given = (log_file, scratch, level, cpu_threads, env or {}, sys.path)

        def start_process(incarnation: int) -> RoleProcess:
            options = self.ray.options(name, num_gpus)
            options |= {"num_gpus": 0} if beside else {}
            host = ray.remote(RoleHost).options(**options).remote(name, *given)
            arguments = kwargs | ({"restart_count": incarnation} if counts_restarts else {})
            met = self._rendezvous_of(name, host) if meets else None
            gpus = host.use_gpus.remote(*map(self._gpus_of, beside)) if beside else None
            starting = host.start.remote(role_class, arguments, met, gpus)
            return RoleProcess(incarnation, host, starting)

        role = Role(
            name,
            log_file,
            start_process,
            budget=self._budget,
            note=self.note,
            record=self._events.record,
            started=self._record_start,
            recover=self._recover_role,
            why_no_room=self._why_no_room,
            can_spare=partial(self._can_spare, name, min_living),
            pause=partial(pause, name) if pause else asyncio.sleep,
            restarts_alone=restarts_alone,
            names=self._names,
        )
        self.roles, self._starting = [*self.roles, role], [*self._starting, role]
        return role

    def _can_spare(self, name: str, min_living: int | None) -> bool:
        """Whether the run can spare this role: at least `min_living` others of its kind live."""
        family = [r for r in self.roles if family_of(r.name) == family_of(name) and r.name != name]
        return min_living is not None and sum(not role.lost for role in family) >= min_living

    async def _recover_role(self, name: str) -> None:
        if self._recover is not None:  # before the loops, nothing is there to recover
            await self._recover(name)

    def _rendezvous_of(self, name: str, host: Any) -> Any:
        """Return a reference to the address where the ranks of one kind meet; rank 0 opens it."""
        if name.endswith("_0"):
            self._rendezvous[family_of(name)] = host.open_rendezvous.remote()
        return self._rendezvous[family_of(name)]

    def _gpus_of(self, name: str) -> Any:
        """Return a reference to the GPUs that Ray gave a role."""
        # A cluster's trainers may move to another node. On one machine new trainers may only swap
        # GPUs, and the other generators stay where they are.
        if self._joined or name not in self._gpus:
            host = next(role.process.host for role in self.roles if role.name == name)
            self._gpus[name] = host.gpus.remote()
        return self._gpus[name]

    async def ready(self, timeout_s: float) -> None:
        """Wait until every spawned role is built; report each, and record it in logs/roles.jsonl.

        A process that ends before its role is built is restarted.
        """
        self._phase("starting roles")
        starting, self._starting = self._starting, []
        self.note(f"starting {', '.join(role.name for role in starting)} ...")
        together = {role for role in starting if not role.restarts_alone}
        alone = [self._ready(role, timeout_s) for role in starting if role.restarts_alone]
        await apart(_all([*alone, self._ready_together(together, timeout_s)]))

    async def _ready(self, role: Role, timeout_s: float) -> None:
        began = time.monotonic()
        await role.ready(timeout_s)
        self.note(f"{role.name} is ready after {time.monotonic() - began:.0f} s")

    async def _ready_together(self, starting: set[Role], timeout_s: float) -> None:
        try:
            await apart(_all(self._ready(role, timeout_s) for role in starting))
        except ExceptionGroup as failures:
            failure = root_cause(failures)
            if not isinstance(failure, RoleFailedError) or failure.kind != "died":
                raise
            await self._restart_together(failure, self._attempt)

    async def supervise(
        self,
        loops: Callable[[], Awaitable[None]],
        begin_again: Callable[[], Awaitable[None]],
        recover: Callable[[str], Awaitable[None]],
    ) -> None:
        """Run the recipe's loops (training, rollouts) to their end, and restart roles that fail.

        A role with `restarts_alone` is restarted while the loops continue, and `recover` brings it
        up to date. If a trainer (a role without `restarts_alone`) fails, or data is lost with a
        node, all trainers restart together; `begin_again` then takes the run back to its last
        checkpoint (without one, to its beginning), and the loops start again.
        """
        self._recover = recover
        while True:
            try:
                return await apart(self._run_watched(loops))
            except ExceptionGroup as failures:
                failure = root_cause(failures)
                if isinstance(failure, ReplayStop):
                    return
                if not isinstance(failure, RoleFailedError) or not self._mends(failure):
                    raise
                await self._restart_together(failure, self._attempt + 1)
                await begin_again()

    async def _run_watched(self, loops: Callable[[], Awaitable[None]]) -> None:
        """Run the loops once; meanwhile, look for roles that die or hang, and record heartbeats."""

        def beat_of_driver() -> None:
            self._beat("driver", resource_use() | {"objects": _objects_in_scope()})

        async def watch_driver() -> None:
            while True:
                beat_of_driver()
                await asyncio.sleep(_HEARTBEAT_EVERY_S)

        heartbeat_s = self._cfg.timeouts.heartbeat_s
        async with asyncio.TaskGroup() as tasks:
            watching = [tasks.create_task(watch_driver())]
            for role in self.roles:
                watch = role.watch(_HEARTBEAT_EVERY_S, heartbeat_s, self._beat)
                watching.append(tasks.create_task(watch, name=f"watch {role.name}"))
                watching.append(tasks.create_task(self._replay_restarts(role)))
            await loops()
            beat_of_driver()
            for task in watching:
                task.cancel()
            last = (role.process_failure(_HEARTBEAT_EVERY_S, self._beat) for role in self.roles)
            await asyncio.gather(*last)

    def _mends(self, failure: RoleFailedError) -> bool:
        """Return whether a restart of all trainers, from a checkpoint, may repair a failure."""
        names = [role.name for role in self._restarted_together()]
        return failure.role in names or (bool(names) and failure.kind == "lost")

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
            (what, step), done = self._last_failure, self._ledger.steps_done
            self._last_failure = failure.what, done
            # An error of the code or the data comes back at the same step, at the latest.
            repeated = what == failure.what and done <= step
            no_room = self._why_no_room()
            pause_s = self._budget.spend(failure, repeated=repeated, no_room=no_room)
            self._attempt = attempt
            event = "rollback" if rollback else "restart"
            self._events.note(event, role=failure.role, what=failure.what)
            self.note(f"{failure.role} {failure.what}{others}; {how} ({self._budget.used()})")
            others = ""
            for role in roles:
                role.process.kill()
            await asyncio.gather(*(role.wait_idle() for role in self.roles))
            await asyncio.sleep(pause_s)
            try:
                await apart(_all(role.end() for role in roles))
                for role in roles:  # in the order of the ranks: the first opens the rendezvous
                    role.start_again()
                await apart(_all(role.ready() for role in roles))
            except ExceptionGroup as failures:
                again = root_cause(failures)
                if not isinstance(again, RoleFailedError):
                    raise
                failure = again
            else:
                self.note(f"the trainers are back after {time.monotonic() - began:.0f} s")
                return

    async def _replay_restarts(self, role: Role) -> None:
        recording = self._events.recording
        while recording and await recording.wait_turn("restart", {"role": role.name}):
            await role.replay_restart(recording.why_restarted())

    def _record_start(self, role: str, identity: Mapping[str, Any]) -> None:
        self._write("roles.jsonl", role, **identity, started=time.time())

    def _beat(self, role: str, use: Mapping[str, Any]) -> None:
        self._write("heartbeats.jsonl", role, time=time.time(), **use)

    def _write(self, file: str, role: str, **fields: Any) -> None:
        append_record(self._logs / file, {"role": role, "attempt": self._attempt, **fields})

    async def close_roles(self, timeout_s: float) -> None:
        """Let every role stop its child processes, at the normal end of a run."""
        self._phase("closing roles")
        await apart(_all(self._close(role, timeout_s) for role in self.roles))

    async def _close(self, role: Role, timeout_s: float) -> None:
        try:
            await role.close(timeout_s)
        except RoleFailedError as failure:
            if not role.restarts_alone:  # a trainer's close may write a profile
                raise
            self.note(f"{role.name} {failure.what}; the run is complete")

    def stop(self) -> None:
        """Kill every process of the run, whatever its state, and remove its temporary files."""
        self._phase("stopping Ray and all processes")

        def kill_roles() -> None:
            for role in self.roles:
                role.process.kill()

        self.ray.stop(kill_roles)


async def _all(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    async with asyncio.TaskGroup() as tasks:
        for work in works:
            tasks.create_task(work)


def _objects_in_scope() -> int:
    """Return the number of Ray objects that this process still refers to."""
    core: Any = ray_worker.global_worker.core_worker  # pyright: ignore[reportAttributeAccessIssue]
    return len(core.get_all_reference_counts())


build_cluster = Cluster
"""Name by which recipes make the cluster of a run; `start` then starts Ray."""
