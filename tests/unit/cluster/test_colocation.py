"""The trainers' turn: who may use the GPUs when, with the real handles, ledger and weight sync."""

import asyncio
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from lib.role import limits, stand_in_role

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
from grpo_components.exchange.event_order import EventOrder
from grpo_components.exchange.ledger import Ledger
from grpo_components.exchange.parameter_server import VLLMParameterServer
from grpo_components.exchange.staleness import StalenessContract
from grpo_components.exchange.weights import snapshot_checksum
from grpo_tools.replay.recorded_run import RecordedOrder

pytestmark = pytest.mark.anyio

B, NAMES = 2, ("generator_0", "generator_1")


class Gpu:
    """What happens on the GPUs, in order."""

    def __init__(self):
        self.happened, self.asleep = [], set()

    def of(self, *words):
        return [each for each in self.happened if each.split()[1] in words]


class Rank:
    """A trainer rank, which finds every generator asleep while it works."""

    def __init__(self, name, gpu):
        self.name, self.gpu, self.version = name, gpu, 0
        self.skips, self.fails, self.hold = False, False, None

    async def train_step(self, packed, advantages, step):
        await self._alone("trains")
        self.version += not self.skips
        return SimpleNamespace(policy_version=self.version, metrics={"time/train": 1.0})

    async def load_state(self, checkpoint):
        await self._alone("restores")

    async def _alone(self, what):
        self.gpu.happened.append(f"{self.name} {what}")
        for _ in range(3):  # whoever else may run does
            assert self.gpu.asleep >= {*NAMES}, f"awake while {self.name} {what}"
            await asyncio.sleep(0)
        if self.hold:
            await self.hold.wait()
        if self.fails:
            raise RuntimeError(f"{self.name} died")

    def gather_weights(self):
        return self.version

    def export_weights(self, version):
        return f"bucket {version}", []


class Engine:
    """A generator's engine; `awake` starts it anew."""

    def __init__(self, name, gpu):
        self.name, self.gpu, self.leaves_behind = name, gpu, 0
        self.before_sleep = partial(asyncio.sleep, 0)

    def awake(self):
        self.gpu.asleep.discard(self.name)
        return self

    async def sleep(self):
        await self.before_sleep()
        self.gpu.happened.append(f"{self.name} sleeps")
        self.gpu.asleep.add(self.name)
        return self.leaves_behind

    async def load_weights(self, version, *buckets):
        await asyncio.sleep(0)
        self.awake().gpu.happened.append(f"{self.name} loads {version}")
        return version, snapshot_checksum([]), None

    def generate(self):
        assert self.name not in self.gpu.asleep
        self.gpu.happened.append(f"{self.name} generates")

    def begin_attempt(self):
        pass


class Setting:
    """Two trainers and two generators that take turns, at max_staleness 0."""

    def __init__(self, events=None):
        prompts = (({"prompt_index": i}, 0) for i in range(10**6))
        self.ledger, self.events = Ledger(StalenessContract(0, B), 50, prompts), []
        self.ledger.events = events or EventOrder()
        self.ledger.events.listen(self.events.append)
        self.gpu, self.turns = Gpu(), Colocation(self.ledger)
        self.ranks = [Rank(f"trainer_{i}", self.gpu) for i in range(2)]
        self.engines = [Engine(name, self.gpu) for name in NAMES]
        self.generators = [self._generator(engine) for engine in self.engines]
        ranks = [stand_in_role(rank.name, rank, restarts_alone=False) for rank in self.ranks]
        turn = partial(self.turns.trainers_turn, self.generators)
        self.trainers = TrainersHandle(ranks, self.ledger, limits(), turn)
        server = stand_in_role("server", VLLMParameterServer())
        server = ParameterServerHandle(server, self.trainers, limits())
        roles = Roles(self.generators, SimpleNamespace(), self.trainers, server, None, None)
        knobs = {"push_every_n_steps": 1, "pull_every_m_rollouts": 1}
        self.weights = WeightSync(self.ledger, roles, push_early=lambda _: False, **knobs)

    def _generator(self, engine):
        async def recover(name):
            await self.weights.recover(name)

        how = {"pause": partial(self.turns.pause, engine.name), "recover": recover}
        role = stand_in_role(engine.name, engine.awake, **how)
        return GeneratorHandle(role, self.ledger, limits())

    async def generate(self, *numbers):
        """One group by each of these generators, until it is in the buffer."""
        entries = []
        for number in numbers:
            entry = await self.ledger.admit(NAMES[number], 1)
            await self.weights.pull_if_due(self.generators[number], entry)
            self.engines[number].generate()
            entries.append(entry)
        for entry in entries:
            await self.ledger.enter_buffer(entry.group_id)

    async def train(self, skipped=False):
        await self.ledger.take([e.group_id for e in self.ledger.in_state("buffered")])
        for rank in self.ranks:
            rank.skips = skipped
        result = await self.trainers.train_step(BATCH, np.zeros((B, 2)))
        await self.weights.push_if_due(result.policy_version)
        self.ledger.finish_step(result.policy_version)
        return result


BATCH = Batch("packed", [], [], "", 0, 0, 0.0)


@pytest.fixture
async def setting():
    """Each generator has put a group into the buffer."""
    setting = Setting()
    await setting.generate(0, 1)
    return setting


async def pass_some_time():
    for _ in range(20):
        await asyncio.sleep(0)


async def test_each_step_finds_the_generators_asleep_and_the_next_groups_wake_them(setting):
    for version in (1, 2):
        result = await setting.train()
        assert result.metrics.keys() == {"time/train", "time/wake", "time/sleep"}
        assert (result.metrics["time/wake"] > 0) == (version > 1)
        turn, setting.gpu.happened = setting.gpu.happened, []
        assert sorted(turn[-4:-2]) == ["generator_0 sleeps", "generator_1 sleeps"]
        assert sorted(turn[-2:]) == ["trainer_0 trains", "trainer_1 trains"]
        woken = [f"{name} loads {version - 1}" for name in NAMES if version > 1]
        assert [each for each in turn if "loads" in each] == woken
        await setting.generate(0, 1)
    order = [e["event"] for e in setting.events if e["event"] in ("sample", "sleep", "publish")]
    assert order == ["sample", "sleep", "publish"] * 2


async def test_a_generator_without_a_group_sleeps_on_and_what_its_engine_keeps_is_recorded(setting):
    setting.engines[1].leaves_behind = 3  # by an environment that failed
    await setting.train()
    abort = {"event": "abort", "attempt": 0, "role": "generator_1", "responses": 3}
    assert [event for event in setting.events if event["event"] == "abort"] == [abort]
    await setting.generate(0, 0)
    assert setting.gpu.asleep == {"generator_1"}
    await setting.train()


@pytest.mark.parametrize("version", [0, 1])
async def test_after_a_skipped_step_the_same_weights_wake_the_generators(setting, version):
    """Even those of the base model, which an engine that slept no longer has."""
    if version:
        await setting.train()
        await setting.generate(0, 1)
    await setting.train(skipped=True)
    setting.gpu.happened.clear()
    await setting.generate(0, 1)
    assert setting.gpu.of("loads") == [f"{name} loads {version}" for name in NAMES]
    assert setting.gpu.asleep == set()


async def test_a_step_waits_for_an_evaluation_that_still_runs(setting):
    async with setting.generators[1].swapping:  # as an evaluation holds it
        training = asyncio.create_task(setting.train())
        await pass_some_time()
        assert not setting.gpu.of("sleeps", "trains")
    await training
    assert setting.gpu.of("trains")


async def test_in_a_replay_a_step_waits_for_the_end_of_the_evaluation_before_it():
    recorded = [
        {"event": "evaluate", "role": "generator_0", "step": 0, "number": 0},
        {"event": "sleep", "step": 1, "number": 1},
    ]
    order = EventOrder(recording=RecordedOrder(recorded, 5))
    setting = Setting(order)
    training = asyncio.create_task(setting.trainers.train_step(BATCH, np.zeros((B, 2))))
    await pass_some_time()
    assert not setting.gpu.happened
    order.record("evaluate", role="generator_0", step=0)
    await training
    assert len(setting.gpu.of("trains")) == 2


async def test_a_generator_that_dies_asleep_starts_again_only_after_the_step(setting):
    for rank in setting.ranks:
        rank.hold = asyncio.Event()
    training = asyncio.create_task(setting.train())
    early = asyncio.create_task(setting.turns.pause("generator_0", 0))
    while len(setting.gpu.of("trains")) < 2:
        await asyncio.sleep(0)
    late = asyncio.create_task(setting.turns.pause("generator_1", 0))
    await pass_some_time()
    assert early.done() and not late.done()
    for rank in setting.ranks:
        rank.hold.set()
    await training
    await late


async def test_a_generator_that_restarts_while_others_fall_asleep_is_put_to_sleep_again(setting):
    async def restart_first():
        setting.engines[1].before_sleep = partial(asyncio.sleep, 0)
        while setting.generators[0].version != -1:  # it has answered
            await asyncio.sleep(0)
        await setting.generators[0].role.replay_restart("died")

    setting.engines[1].before_sleep = restart_first
    await setting.train()
    assert setting.gpu.of("sleeps").count("generator_0 sleeps") == 2


async def test_a_turn_that_fails_ends_and_a_lost_generator_is_not_waited_for(setting):
    setting.ranks[1].fails = True
    with pytest.raises(RoleFailedError) as failed:
        await setting.train()
    assert failed.value.role == "trainer_1"
    await setting.turns.pause("generator_0", 0)
    setting.ranks[1].fails = False

    async def lost():
        setting.generators[0].role.lost = True
        setting.gpu.asleep.add("generator_0")
        raise RoleLostError("generator_0")

    setting.generators[0].sleep = lost
    await setting.trainers.load_state("/checkpoint")
    assert len(setting.gpu.of("restores")) == 2
    await setting.weights.restore()
    assert setting.gpu.asleep == {"generator_0"}, "it is lost; the other pulled and woke"


async def test_no_turn_begins_while_a_group_is_generated():
    setting = Setting()
    await setting.ledger.admit("generator_0", 1)
    with pytest.raises(AssertionError, match=r"groups \[0\] run"):
        await setting.trainers.train_step(BATCH, np.zeros((B, 2)))
