"""The trainers' turn: who may use the GPUs when, with the real handles, ledger and weight sync."""

import asyncio
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from lib.role import stand_in_role

from grpo_components.cluster.batch import Batch
from grpo_components.cluster.colocation import Colocation
from grpo_components.cluster.handles import (
    GeneratorHandle,
    ParameterServerHandle,
    Roles,
    TrainersHandle,
)
from grpo_components.cluster.weight_sync import WeightSync
from grpo_components.errors import RoleFailedError, RoleLostError
from grpo_components.exchange.ledger import Ledger
from grpo_components.exchange.parameter_server import VLLMParameterServer
from grpo_components.exchange.staleness import StalenessContract
from grpo_components.exchange.weights import snapshot_checksum
from grpo_components.replay.event_order import EventOrder

pytestmark = pytest.mark.anyio

B = 2
BATCH = Batch("packed", [], [], "", 0, 0, 0.0)


class Gpu:
    """What happens on the GPUs, in order; a trainer's step finds every generator asleep."""

    def __init__(self):
        self.happened, self.asleep = [], set()

    def add(self, who, what):
        self.happened.append(f"{who} {what}")

    def of(self, *words):
        return [each for each in self.happened if each.split()[1] in words]


class Rank:
    def __init__(self, name, gpu, generators):
        self.name, self.gpu, self.generators = name, gpu, generators
        self.version, self.skips, self.fails, self.hold = 0, False, False, None

    async def train_step(self, packed, advantages, step):
        await self._alone("trains")
        self.version += not self.skips
        return SimpleNamespace(policy_version=self.version, metrics={"time/train": 1.0})

    async def load_state(self, checkpoint):
        await self._alone("restores")

    async def _alone(self, what):
        self.gpu.add(self.name, what)
        for _ in range(3):  # whoever else may run does
            assert self.gpu.asleep >= self.generators, f"awake while {self.name} {what}"
            await asyncio.sleep(0)
        if self.hold:
            await self.hold.wait()
        if self.fails:
            raise RuntimeError(f"{self.name} died")

    def gather_weights(self):
        return self.version

    def export_weights(self, version):
        return f"bucket {version}", []


async def no_wait():
    await asyncio.sleep(0)


class Engine:
    def __init__(self, name, gpu):
        self.name, self.gpu, self.leaves_behind = name, gpu, 0
        self.before_sleep = no_wait

    def awake(self):
        """The engine of a new process."""
        self.gpu.asleep.discard(self.name)
        return self

    async def sleep(self):
        await self.before_sleep()
        self.gpu.add(self.name, "sleeps")
        self.gpu.asleep.add(self.name)
        return self.leaves_behind

    async def load_weights(self, version, *buckets):
        await asyncio.sleep(0)
        self.gpu.add(self.name, f"loads {version}")
        self.gpu.asleep.discard(self.name)
        return version, snapshot_checksum([]), None

    def generate(self):
        assert self.name not in self.gpu.asleep
        self.gpu.add(self.name, "generates")

    def begin_attempt(self):
        pass


class Setting:
    """Two trainers and two generators that take turns, at max_staleness 0."""

    def __init__(self, events=None):
        prompts = (({"prompt_index": i}, 0) for i in range(10**6))
        self.ledger, self.events = Ledger(StalenessContract(0, B), 50, prompts), []
        self.ledger.events = events or EventOrder()
        self.ledger.events.listen(self.events.append)
        self.gpu = Gpu()
        names = {f"generator_{i}" for i in range(2)}
        self.ranks = [Rank(f"trainer_{i}", self.gpu, names) for i in range(2)]
        self.engines = [Engine(name, self.gpu) for name in sorted(names)]
        self.colocation = turns = Colocation(self.ledger)
        generators = [
            GeneratorHandle(
                stand_in_role(
                    *(engine.name, engine.awake),
                    pause=partial(turns.pause, engine.name),
                    recover=lambda name: self.weights.recover(name),
                ),
                *(self.ledger, 9.0, 9.0),
            )
            for engine in self.engines
        ]
        ranks = [stand_in_role(rank.name, rank, restarts_alone=False) for rank in self.ranks]
        self.roles = Roles(
            generators=generators,
            buffer=SimpleNamespace(),
            trainers=TrainersHandle(
                ranks, self.ledger, 9.0, 9.0, partial(turns.trainers_turn, generators)
            ),
            server=ParameterServerHandle(stand_in_role("server", VLLMParameterServer()), 9.0),
            references=None,
            reward_model=None,
        )
        knobs = {"push_every_n_steps": 1, "pull_every_m_rollouts": 1}
        self.weights = WeightSync(self.ledger, self.roles, push_early=lambda _: False, **knobs)

    @property
    def generators(self):
        return self.roles.generators

    async def generate(self, *numbers):
        """One group by each of these generators, until it is in the buffer."""
        entries = []
        for number in numbers:
            entry = await self.ledger.admit(self.generators[number].name, 1)
            await self.weights.pull_if_due(self.generators[number], entry)
            self.engines[number].generate()
            entries.append(entry)
        for entry in entries:
            await self.ledger.enter_buffer(entry.group_id)

    async def train(self, skipped=False):
        await self.ledger.take([e.group_id for e in self.ledger.in_state("buffered")])
        for rank in self.ranks:
            rank.skips = skipped
        result = await self.roles.trainers.train_step(BATCH, np.zeros((B, 2)))
        await self.weights.push_if_due(result.policy_version)
        self.ledger.finish_step(result.policy_version)
        return result


async def test_each_step_finds_the_generators_asleep_and_the_next_groups_wake_them():
    setting = Setting()
    for version in (1, 2):
        await setting.generate(0, 1)
        result = await setting.train()
        assert result.metrics.keys() == {"time/train", "time/wake", "time/sleep"}
        assert (result.metrics["time/wake"] > 0) == (version > 1)
        turn, setting.gpu.happened = setting.gpu.happened, []
        assert sorted(turn[-4:-2]) == ["generator_0 sleeps", "generator_1 sleeps"]
        assert sorted(turn[-2:]) == ["trainer_0 trains", "trainer_1 trains"]
        woken = [f"generator_{i} loads {version - 1}" for i in (0, 1) if version > 1]
        assert [each for each in turn if "loads" in each] == woken
    order = [e["event"] for e in setting.events if e["event"] in ("sample", "sleep", "publish")]
    assert order == ["sample", "sleep", "publish"] * 2


async def test_a_generator_without_a_group_sleeps_on():
    setting = Setting()
    await setting.generate(0, 0)
    await setting.train()
    await setting.generate(0, 0)
    assert setting.gpu.asleep == {"generator_1"}
    await setting.train()


async def test_after_a_skipped_step_the_same_weights_wake_the_generators():
    setting = Setting()
    await setting.generate(0, 1)
    await setting.train()
    await setting.generate(0, 1)
    await setting.train(skipped=True)
    await setting.generate(0, 1)
    assert [each for each in setting.gpu.happened if "loads" in each] == [
        *("generator_0 loads 1", "generator_1 loads 1"),
        *("generator_0 loads 1", "generator_1 loads 1"),
    ]


async def test_a_skipped_first_step_needs_weights_that_were_never_pushed():
    """Version 0 is the base model, which an engine that slept at level 2 no longer has."""

    setting = Setting()
    await setting.generate(0, 1)
    await setting.train(skipped=True)
    await setting.generate(0, 1)
    assert setting.gpu.asleep == set()
    assert setting.gpu.happened[-2:] == ["generator_1 loads 0", "generator_1 generates"]


async def test_a_step_waits_for_an_evaluation_that_still_runs():
    setting = Setting()
    await setting.generate(0, 1)
    async with setting.generators[1].swapping:  # as an evaluation holds it
        training = asyncio.create_task(setting.train())
        for _ in range(20):
            await asyncio.sleep(0)
        assert not setting.gpu.of("sleeps", "trains")
    await training
    assert setting.gpu.of("trains")


async def test_in_a_replay_a_step_waits_for_the_end_of_the_evaluation_before_it():
    recorded = [
        {"event": "evaluate", "role": "generator_0", "step": 0, "number": 0},
        {"event": "sleep", "step": 1, "number": 1},
    ]
    order = EventOrder(recorded=recorded, timeout_s=5)
    setting = Setting(order)
    training = asyncio.create_task(setting.roles.trainers.train_step(BATCH, np.zeros((B, 2))))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not setting.gpu.happened
    order.record("evaluate", role="generator_0", step=0)
    await training
    assert len(setting.gpu.of("trains")) == 2


async def test_a_generator_that_dies_asleep_starts_again_only_after_the_step():
    setting = Setting()
    await setting.generate(0, 1)
    for rank in setting.ranks:
        rank.hold = asyncio.Event()
    training = asyncio.create_task(setting.train())
    restart = asyncio.create_task(setting.colocation.pause("generator_0", 0))
    while len(setting.gpu.of("trains")) < 2:
        await asyncio.sleep(0)
    late = asyncio.create_task(setting.colocation.pause("generator_1", 0))
    for _ in range(20):
        await asyncio.sleep(0)
    assert restart.done() and not late.done()
    for rank in setting.ranks:
        rank.hold.set()
    await training
    await late


async def test_a_generator_that_restarts_while_others_fall_asleep_is_put_to_sleep_again():
    setting = Setting()

    async def restart_first():
        setting.engines[1].before_sleep = no_wait
        while setting.generators[0].version != -1:  # it has answered
            await asyncio.sleep(0)
        await setting.generators[0].role.replay_restart("died")

    setting.engines[1].before_sleep = restart_first
    await setting.generate(0, 1)
    await setting.train()
    assert setting.gpu.of("sleeps").count("generator_0 sleeps") == 2


async def test_a_turn_that_fails_ends_and_a_lost_generator_is_not_waited_for():
    setting = Setting()
    await setting.generate(0, 1)
    setting.ranks[1].fails = True
    with pytest.raises(RoleFailedError) as failed:
        await setting.train()
    assert failed.value.role == "trainer_1"
    await setting.colocation.pause("generator_0", 0)
    setting.ranks[1].fails = False

    async def lost():
        setting.generators[0].role.lost = True
        setting.gpu.asleep.add("generator_0")
        raise RoleLostError("generator_0")

    setting.generators[0].sleep = lost
    await setting.roles.trainers.load_state("/checkpoint")
    assert len(setting.gpu.of("restores")) == 2
    await setting.weights.restore()
    assert setting.gpu.asleep == {"generator_0"}, "it is lost; the other pulled and woke"


async def test_what_a_failed_environment_left_in_an_engine_is_recorded():
    setting = Setting()
    setting.engines[1].leaves_behind = 3
    await setting.generate(0, 1)
    await setting.train()
    (abort,) = (event for event in setting.events if event["event"] == "abort")
    assert abort == {"event": "abort", "attempt": 0, "role": "generator_1", "responses": 3}


async def test_no_turn_begins_while_a_group_is_generated():
    setting = Setting()
    await setting.ledger.admit("generator_0", 1)
    with pytest.raises(AssertionError, match=r"groups \[0\] run"):
        await setting.roles.trainers.train_step(BATCH, np.zeros((B, 2)))
