"""Digests what decides how a run goes on: of schedules in one state, one is followed on."""

import asyncio
import hashlib
import re
from collections import deque
from collections.abc import Callable
from types import CoroutineType, MethodType
from typing import Any

from interleavings.roles import Generator, Sampled, Trainer
from interleavings.world import World
from lib.role import Reference, RemoteCall, StandInHost

from grpo_components.cluster.batch import Batch
from grpo_components.cluster.handles import GeneratorHandle
from grpo_components.cluster.role import Role
from grpo_components.cluster.role_process import RoleProcess
from grpo_components.exchange.ledger_entry import LedgerEntry
from grpo_components.exchange.replay_buffer import ReplayBuffer
from grpo_components.training.step_result import StepResult


def state_of(world: World) -> bytes:
    """Return a digest of a world's state.

    It has the ledger, handles, processes with their calls, and for each task where it stands, its
    local variables and its place in every queue. What no decision reads is left out, as clocks.
    """
    parts = _World(world).parts()
    digests = [_digest(parts, names) for names in _renamings(world)]
    return min(digests)


def _renamings(world: World) -> list[dict[str, str]]:
    """Return the ways to call the generators, which are alike: one may stand for the other."""
    names = [generator.name for generator in world.roles.generators]
    alike = all(name in world.bound.crash for name in names) or not {*names} & {*world.bound.crash}
    return (
        [{}, dict(zip(names, reversed(names), strict=True))] if alike and len(names) == 2 else [{}]
    )


def _digest(parts: list[str], names: dict[str, str]) -> bytes:
    if names:
        pattern = re.compile("|".join(names))
        parts = [pattern.sub(lambda found: names[found[0]], part) for part in parts]
    return hashlib.blake2b("\n".join(sorted(parts)).encode(), digest_size=12).digest()


class _World:
    def __init__(self, world: World) -> None:
        self._world = world
        self._tasks: dict[int, Any] = {}
        """Descriptions of tasks, by id: many refer to the same one."""
        self._futures: set[int] = set()

    def parts(self) -> list[str]:
        """Return descriptions of all parts, whose order does not matter."""
        world, parts = self._world, []
        live = [process for process in world.processes if process.alive or process.calls]
        for kind, values in {
            "run": [(world.crashes_left, world.early_left, world.published, world.main.done())],
            "ledger": [self._ledger(), len(world.budget._restarts)],
            "generator": map(self._generator, world.roles.generators),
            "books": [(world.books.problem, world.books.residual)],  # 0, whatever came before
            "role": map(self._role, world.cluster.roles),
            "process": map(self._process, live),
            "call": (self._sent(call) for process in live for call in process.calls),
            "weights": [self._weights()],
            "saved": [self._saved()] if "trainer_0" in world.bound.crash else [],
            "ready": [[self._handle(handle) for handle in world.driver.ready]],
            "asleep": [[self._handle(timer) for timer in world.driver.sleepers()]],
            "task": (self._task(task) for task in world.driver.tasks if not task.done()),
        }.items():
            parts += [f"{kind} {value!r}" for value in values]
        return parts

    def _ledger(self) -> Any:
        ledger, prompts = self._world.ledger, self._world.prompts
        counters = ledger.steps_done, ledger.policy_version, ledger.published_version, ledger.issued
        return (
            *(counters, ledger.trained_groups, sorted(ledger.dropped_groups.items())),
            ledger.attempt,
            [self._entry(entry) for entry in ledger._living.values()],
            [self._entry(entry) for entry in ledger._interrupted],
            [(prompt["prompt_index"], epoch) for prompt, epoch in ledger._reissued],
            (prompts.drawn, sorted(prompts.ended)),
            [self._queue(event) for event in (ledger._changed, ledger._opened)],
        )

    def _entry(self, entry: LedgerEntry) -> Any:
        versions = entry.needed_version, entry.start_version, entry.target_step
        parts = self._all(entry.parts[:1]) if self._world.bound.crash else len(entry.parts)
        return entry.group_id, entry.prompt_index, entry.state, versions, parts

    def _generator(self, handle: GeneratorHandle) -> Any:
        counts = handle.version, handle.held_version, handle.rollouts_since_pull, handle._reserved
        return handle.name, counts, self._queue(handle.swapping), self._all(handle.loads)

    def _role(self, role: Role) -> Any:
        restarting = role._restarting
        waiting = (
            [] if restarting is None else [self._callback(c) for c, _ in restarting._callbacks]
        )
        return (
            role.name,
            role.lost,
            role.process.incarnation,
            waiting,
            sorted(role._errors.items()),
        )

    def _process(self, process: StandInHost) -> Any:
        return process.name, process.alive, self._of_role(process.role)

    @staticmethod
    def _sent(call: RemoteCall) -> Any:
        return call.name, call.host.alive, call.stage, call.error is not None, len(call.waiters)

    def _of_role(self, role: Any) -> Any:
        if isinstance(role, Generator):
            room = role.budget._free, role.budget._reserved
            return role.weights, role._loading, room, sorted(role._ends)
        if isinstance(role, Trainer):
            return role.weights, role._held, sorted(role.gathered.items())
        if isinstance(role, ReplayBuffer):
            live = sorted(group for group, _ in role._buffer[:])
            return live, [each.group_id for each in role._dropped], len(role._changed._waiters)
        return role and self.shown(role.__dict__.get("_pushes"))

    def _weights(self) -> Any:
        weights, server = self._world.weights, self._world.roles.server
        chain = [(push.version, push.nbytes is None) for push in server._pushes]
        pulled = self.shown(weights._pushed[0])
        return weights._ever_pushed, chain, pulled, self._queue(weights._reading_manifests)

    def _saved(self) -> Any:
        start, held = self._world.journal._start, self._world.journal.held[0]
        states = [(d["ledger"]["steps_done"], d["ledger"]["issued"], d["prompts"], [
            (e["group_id"], e["state"], e["start_version"]) for e in d["ledger"]["living"]
        ]) for d in (start.driver, held)]  # fmt: skip
        return repr(states), start.attempt, start.checkpoint

    # ---- tasks, and what they wait for

    def _queue(self, lock: Any) -> Any:
        """Return who waits for a lock or event, in the order in which they go on."""
        waiters = getattr(lock, "_waiters", None) or ()
        return getattr(lock, "_locked", None), [self._future(waiter) for waiter in waiters]

    def _future(self, future: Any) -> Any:
        if id(future) in self._futures:  # a shield and what it shields refer to each other
            return "seen"
        self._futures.add(id(future))
        return future.done(), [self._callback(callback) for callback, _ in future._callbacks or ()]

    def _handle(self, handle: asyncio.Handle) -> Any:
        given = [self._future(a) if asyncio.isfuture(a) else None for a in handle._args or ()]
        if isinstance(getattr(handle._callback, "__self__", None), asyncio.Task):
            given = []
        return self._callback(handle._callback), given

    def _callback(self, callback: Any) -> Any:
        owner = getattr(callback, "__self__", None)
        if isinstance(owner, asyncio.Task):
            return self._task(owner)
        if isinstance(owner, RemoteCall):
            return owner.name, owner.stage
        cells = getattr(callback, "__closure__", None) or ()
        inner = [cell.cell_contents for cell in cells]
        futures = [self._future(each) for each in inner if asyncio.isfuture(each)]
        return getattr(callback, "__qualname__", type(callback).__name__), futures

    def _task(self, task: Any) -> Any:
        if id(task) not in self._tasks:
            self._tasks[id(task)] = "itself"
            waits = task._fut_waiter
            self._tasks[id(task)] = (
                self._coroutine(task.get_coro()),
                *(task.done(), task._must_cancel, task.cancelling()),
                waits is not None and waits.done(),
            )
        return self._tasks[id(task)]

    def _coroutine(self, coroutine: Any) -> Any:
        """Return where a coroutine stands, and each that it awaits."""
        found = []
        while isinstance(coroutine, CoroutineType) and coroutine.cr_frame is not None:
            frame = coroutine.cr_frame
            name, known = coroutine.__qualname__, []
            if not name.endswith(_ONLY_LOOP_VARIABLES):
                known = sorted((key, self.shown(each)) for key, each in frame.f_locals.items())
            found.append((name, frame.f_lasti, known))
            coroutine = coroutine.cr_await
        return found

    def shown(self, value: Any) -> Any:
        """Return what of a local variable can make a difference, as plain values."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind in _OF_KIND:
            return _OF_KIND[kind](self, value)
        if isinstance(value, BaseException):
            return kind.__name__, f"{value}"
        return value.__func__.__qualname__ if kind is MethodType else kind.__name__

    def _all(self, values: Any) -> Any:
        return [self.shown(each) for each in values]

    def _mapping(self, values: Any) -> Any:
        return [(f"{key}", self.shown(each)) for key, each in values.items()]

    def _reference(self, each: Reference) -> Any:
        call = each.call
        # Of parts, the first one has what was made; nobody makes decisions by the others.
        return call.name, call.stage, self._result(call) if not each.number else None

    def _result(self, call: RemoteCall) -> Any:
        return self.shown(call.result) if call.error is None else type(call.error).__name__

    def _task_group(self, group: asyncio.TaskGroup) -> Any:
        errors = self._all(group._errors)
        return len(group._tasks), errors, group._aborting, group._parent_cancel_requested


_ONLY_LOOP_VARIABLES = ("Distributed.loops", "Cluster._run_watched")
"""Coroutines whose variables are those of loops that have ended."""
_PLAIN = {type(None), bool, int, str}
_OF_KIND: dict[type, Callable[[_World, Any], Any]] = {
    **dict.fromkeys((list, tuple, deque), _World._all),
    dict: _World._mapping,
    LedgerEntry: lambda _, entry: f"entry {entry.group_id}",
    Sampled: lambda _, group: group,
    Batch: lambda _, batch: batch.batch_hash,
    StepResult: lambda _, result: result.policy_version,
    Reference: _World._reference,
    RemoteCall: lambda _, call: (call.name, call.stage),
    GeneratorHandle: lambda _, handle: handle.name,
    Role: lambda _, role: role.name,
    RoleProcess: lambda _, process: (process.incarnation, process.ended.is_set()),
    asyncio.Event: lambda world, event: (event.is_set(), world._queue(event)),
    asyncio.TaskGroup: _World._task_group,
    asyncio.Task: lambda _, task: (task.done(), task.get_coro().__qualname__),
    CoroutineType: lambda _, coroutine: coroutine.__qualname__,
}
