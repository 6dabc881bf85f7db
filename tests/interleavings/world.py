"""One run of the recipe's own loops, ledger, handles and supervision, in steps that are chosen."""

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from interleavings.around import Prompts
from interleavings.controlled_loops import ControlledLoop
from interleavings.roles import BrokenRule, Generator, Reference, Trainer
from lib.role import NEVER_S, RemoteCall, StandInHost, stand_in_role

from grpo_components.cluster.batch import Batch
from grpo_components.cluster.cluster import Cluster
from grpo_components.cluster.role import RestartBudget, Role
from grpo_components.exchange.event_order import Event, EventOrder
from grpo_components.exchange.ledger import Ledger
from grpo_components.exchange.ledger_entry import LedgerEntry
from grpo_components.exchange.parameter_server import VLLMParameterServer
from grpo_components.exchange.replay_buffer import ReplayBuffer
from grpo_components.exchange.staleness import StalenessContract
from grpo_components.records.journal import Journal
from grpo_components.records.receipts import Receipts
from grpo_components.records.resume import RunStart
from grpo_components.settings import Settings, Timeouts
from grpo_components.training.step_result import StepResult
from grpo_components.trajectory import GroupSummary
from grpo_tools.books import Books
from grpo_tools.replay.recorded_run import RecordedOrder
from grpo_tools.simulate.simulation import connected

PURE = {
    *("gather_weights", "train_step", "hold_state", "write_state", "load_state", "read_state"),
    *("export_weights", "add_logprobs", "begin_attempt", "refill", "start"),
}
"""Calls whose work only the caller sees, by its answer: work and answer are one step."""
WITH_PARTS = {"add", "load_weights"}
"""Calls that wait for another role's result, and may be overtaken meanwhile: a step of their own.

All others reach their role in the order in which the driver sends them, so that they can begin when
they are sent: no other role sees what they change.
"""


@dataclass(frozen=True)
class Bound:
    """What is explored: a small job, and what may befall it."""

    generators: int = 2
    groups_per_step: int = 1
    steps: int = 3
    max_staleness: int = 1
    push_every: int = 1
    pull_every: int = 1
    stale_groups: Literal["drop", "wait"] = "drop"
    rollouts_in_flight: int = 1
    references: int = 0
    failing: tuple[int, ...] = ()
    """Prompts whose responses all fail, so that their groups are dropped."""
    crash: tuple[str, ...] = ()
    """Roles one of which may die, once, at any point."""
    max_restarts: int = 8
    save_every: int = 1
    early: int = 0
    """Answers that may arrive while the driver still has callbacks to run."""


@dataclass
class Choice:
    label: str
    take: Callable[[], None]
    early: bool = False


class World:
    """A run up to some point, and the steps that can come next."""

    def __init__(self, bound: Bound, logs: Path, replayed: Sequence[Event] | None = None) -> None:
        self.bound, self.now = bound, 0.0
        self.driver = ControlledLoop(lambda: self.now)
        self.processes: list[StandInHost] = []
        self.files: dict[str, Any] = {}
        self.crashes_left, self.early_left = int(bool(bound.crash)), bound.early
        self.events: list[Event] = []
        self.published = -1
        self.broken: AssertionError | None = None
        """Rule that a role found broken."""
        numbered = [event | {"number": n} for n, event in enumerate(replayed or ())]
        self.recording = RecordedOrder(numbered, NEVER_S) if replayed is not None else None
        self._build(logs)
        self.main = self.driver.create_task(self._main())
        self._settle()

    async def _main(self) -> None:
        # As `train`, after `ready`.
        await self.cluster.supervise(self.recipe.loops, self.begin_again, self._recover)

    async def _recover(self, role: str) -> None:
        await self.weights.recover(role)

    # ---- building

    def _role(self, name: str, build: Callable[[], Any], **options: Any) -> Role:
        record, names = self.ledger.events.record, self._names
        given = {"budget": self.budget, "record": record, "names": names, **options}
        # The end of a pause is a step.
        role = stand_in_role(name, build, self, pause=asyncio.sleep, recover=self._recover, **given)
        self.cluster.roles.append(role)
        return role

    # ---- the calls on roles: see `lib.role.Scheduler`

    def started(self, host: StandInHost) -> None:
        host.loop = ControlledLoop()
        self.processes.append(host)

    def sent(self, call: RemoteCall) -> None:
        """Begin a call, unless that is a step of its own."""
        if call.method not in PURE and call.method not in WITH_PARTS:
            self._begin(call)

    def answered(self, call: RemoteCall) -> None:
        """Note what is broken; that an answer arrives is a step."""
        if isinstance(call.error, AssertionError):
            self.broken = call.error

    def _begin(self, call: RemoteCall) -> None:
        call.begin()
        call.host.loop.run_all()

    def _build(self, logs: Path) -> None:
        bound = self.bound
        contract = StalenessContract(bound.max_staleness, bound.groups_per_step)
        self.prompts = Prompts()
        self.ledger = Ledger(contract, bound.steps, self.prompts)
        self.ledger.events = EventOrder(0, self.recording, [self._note])
        self._names: dict[str, str] = {}
        self.budget = RestartBudget(bound.max_restarts, math.inf, lambda: self.now)
        timeouts = Timeouts.model_construct(heartbeat_s=math.inf)
        cfg = Settings.model_construct(output_dir=str(logs), log_level="WARNING", timeouts=timeouts)
        self.cluster = Cluster(cfg, self.ledger, lambda line: None, lambda line: None)
        self.cluster._budget = self.budget
        # In a replay, the order within an engine is its schedule's, which no stand-in has.
        most = bound.steps if self.recording else bound.max_staleness
        trainer = partial(Trainer, most, bound.groups_per_step, self.files)
        generator, generators = partial(Generator, bound.rollouts_in_flight), list[Role]()

        def can_spare() -> bool:
            return sum(not role.lost for role in generators) > 1

        buffer = partial(ReplayBuffer, contract=contract, timeout_s=NEVER_S)
        roles = {
            "replay_buffer": [self._role("replay_buffer", buffer)],
            "parameter_server": [self._role("parameter_server", VLLMParameterServer)],
            "trainer": [self._role("trainer_0", trainer, restarts_alone=False)],
            "generator": generators,
        }
        for number in range(bound.generators):
            name = f"generator_{number}"
            generators.append(self._role(name, generator, can_spare=can_spare))
        roles["reference"] = [
            self._role(f"reference_{n}", Reference) for n in range(bound.references)
        ]
        knobs = bound.groups_per_step, bound.stale_groups, bound.push_every, bound.pull_every
        recipe = self.recipe = connected(self.ledger, roles, self, *knobs)
        self.roles, self.weights = recipe.roles, recipe.weights
        self.books = books = Books(range(bound.steps + 1))
        pages: Any = books  # in place of the file: see `Pages`
        receipts = self.receipts = Receipts(pages, self.ledger, {})
        saves = {
            "rollout_only": "trainer_0" not in bound.crash,
            "save_every_n_steps": bound.save_every,
        }
        cfg = Settings.model_construct(output_dir="/nowhere", **saves)
        state = {"ledger": self.ledger.state_dict(), "prompts": self.prompts.state_dict()}
        none: Any = None  # nobody asks for the process's identity, the lock, or the log
        start = RunStart(0, None, "", Path("/nowhere"), state, none, none)
        self.journal = Journal(cfg, start, self.ledger, self.prompts, receipts, none)
        self.journal.hold()

    # ---- what the loops call of `Run`

    async def restore(self) -> None:
        await self.journal.restore(self.roles, self.weights)

    async def begin(self, tasks: asyncio.TaskGroup) -> None:
        """No evaluation before the first step."""

    def has_trainable(self, entry: LedgerEntry, summary: GroupSummary) -> bool:
        """Check a group's labels; return whether its prompt is one of those that work."""
        order = entry.needed_version, entry.start_version, summary.oldest_version
        if list(order) != sorted(order) and not self.recording:
            what = "needed version, version at its start, oldest token"
            raise BrokenRule(f"group {entry.group_id}: {what} are {order}")
        return entry.prompt_index not in self.bound.failing

    async def finish_step(self, batch: Batch, advantages: Any, result: StepResult) -> None:
        step = await self.journal.commit(batch.batch_hash, result)
        await self.journal.save_if_due(step, self.roles, batch.packed)

    async def finish(self) -> None:
        """Nothing is left to write."""

    async def begin_again(self) -> None:
        await self.journal.roll_back()
        self.published = -1
        await asyncio.gather(self.roles.server.begin_again(), self.roles.buffer.begin_again())

    def _note(self, event: Event) -> None:
        self.events.append(event)
        if event["event"] == "drop" and not event["reissue"]:
            living = {entry.group_id: entry for entry in self.ledger.living()}
            self.prompts.ended += [living[number].prompt_index for number in event["groups"]]
        if event["event"] == "publish":
            if event["version"] <= self.published:
                raise BrokenRule(f"version {event['version']} published after {self.published}")
            self.published = event["version"]
        if event["event"] == "step" and event["policy_version"] != event["trained_from"] + 1:
            raise BrokenRule(f"version {event['policy_version']} after {event['trained_from']}")

    # ---- steps

    def choices(self) -> list[Choice]:
        if self.main.done():
            return []
        busy, found = bool(self.driver.ready), []
        if busy:
            found.append(Choice("the driver goes on", self.driver.run_next))
            if not self.early_left:
                return found
        for process in self.processes:
            for call in list(process.calls):
                found += self._of_call(call, busy)
        if not busy:
            found += [
                Choice("the pause before a restart ends", partial(self._wake, timer))
                for timer in self.driver.sleepers()
            ]
            if self.crashes_left:
                for process in self.processes:
                    if process.alive and process.name in self.bound.crash:
                        found += self._deaths(process)
        return found

    def _of_call(self, call: RemoteCall, busy: bool) -> Iterator[Choice]:
        stage, host = call.stage, call.host
        if stage == "answered":
            yield Choice(f"{call.name} arrives", call.arrive, busy)
        elif busy or not host.alive:
            return
        elif stage == "sent" and call.can_begin():
            yield Choice(call.name, partial(self._work, call))
        elif stage == "at work" and call.method == "generate_group":
            yield Choice(call.name, partial(self._end_group, call))

    def _hidden(self) -> None:
        """Let exports end whose end nobody can tell from that of what waits for them."""
        for process in self.processes:
            for call in list(process.calls):
                if call.method == "export_weights" and call.stage == "sent":
                    self._work(call)

    def _work(self, call: RemoteCall) -> None:
        if call.method == "start":
            call.answer({"pid": 0, "node_id": ""})
        else:
            self._begin(call)
        if call.method in PURE and call.stage == "answered":
            call.arrive()

    def _end_group(self, call: RemoteCall) -> None:
        call.host.role.end_group(call.args[2])
        call.host.loop.run_all()

    def _wake(self, timer: asyncio.TimerHandle) -> None:
        self.now = max(self.now, timer.when())
        self.driver.wake(timer)

    def _deaths(self, process: StandInHost) -> Iterator[Choice]:
        """Yield the deaths of a process, which differ in how many answers it still sent."""
        for answers in range(1 + sum(call.stage == "answered" for call in process.calls)):
            how = f", its last {answers} answers arrive" if answers else ""
            yield Choice(f"{process.name} dies{how}", partial(self._crash, process, answers))

    def _crash(self, process: StandInHost, answers: int) -> None:
        self.crashes_left -= 1
        process.end(answers)

    def take(self, choice: Choice) -> None:
        """Take a step; without early answers, the driver then runs until it waits."""
        self.early_left -= choice.early
        choice.take()
        self._settle()

    def _settle(self) -> None:
        if not self.early_left:
            self.driver.run_all()
        if "trainer_0" not in self.bound.crash:
            self._hidden()
        if self.broken:
            raise self.broken
        for loop in (self.driver, *(process.loop for process in self.processes)):
            for problem in loop.problems:
                raise problem if isinstance(problem, BaseException) else BrokenRule(problem)

    def close(self) -> None:
        for loop in (self.driver, *(process.loop for process in self.processes)):
            loop.close()
