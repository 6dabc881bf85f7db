"""Weights are pushed every n steps and pulled every m rollouts; each load is an event.

Pushes are deltas while they take less room together than a whole push; only sizes decide.
"""

import asyncio
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lib.role import limits, stand_in_role

from grpo_components.cluster.handles import (
    MAX_DELTAS,
    GeneratorHandle,
    ParameterServerHandle,
    Roles,
    TrainersHandle,
)
from grpo_components.cluster.weight_sync import WeightSync
from grpo_components.errors import DisagreementError, RoleFailedError
from grpo_components.exchange.event_order import EventOrder
from grpo_components.exchange.ledger import Ledger
from grpo_components.exchange.parameter_server import VLLMParameterServer
from grpo_components.exchange.staleness import StalenessContract
from grpo_components.exchange.weight_deltas import NO_BASE, DeltaEncoder, RebuiltWeights
from grpo_components.exchange.weight_probe import ProbeReading
from grpo_components.exchange.weights import (
    TensorEntry,
    pack_bucket,
    pushed_layers,
    snapshot_checksum,
    unpack_buckets,
)
from grpo_tools.replay.recorded_run import RecordedOrder

pytestmark = pytest.mark.anyio

CHECKSUM = snapshot_checksum([])


class Trainer:
    """A rank whose weights are their version."""

    version = 0

    def gather_weights(self):
        return self.version

    def export_weights(self, version):
        return f"bucket {version}", []


class Engine:
    """A generator that loads whatever it gets."""

    checksum = CHECKSUM
    probe = None

    def __init__(self):
        self.loaded = []

    async def load_weights(self, version, *buckets):
        await asyncio.sleep(0)  # the others may run meanwhile
        self.loaded.append((version, buckets))
        return version, self.checksum, self.probe

    def begin_attempt(self):
        self.loaded.append("begin_attempt")


class DeltaTrainer(Trainer):
    """A rank whose pushes are deltas of real bytes."""

    def __init__(self):
        self.encoder, self.pushed = DeltaEncoder(), {}

    def export_weights(self, version, base):
        tensor = torch.arange(10**4) + version * (torch.arange(10**4) % 50 == 0)
        self.pushed[version] = pack_bucket([("a", tensor)])
        delta = self.encoder.encode(version, self.pushed[version], base)
        return delta, delta.manifest


class DeltaEngine:
    """A generator that rebuilds what it gets."""

    def __init__(self):
        self.weights, self.loaded, self.sizes = RebuiltWeights(), {}, []

    async def load_weights(self, version, *buckets):
        self.sizes.append([len(bucket.packed) for bucket in buckets])
        (rebuilt,) = self.weights.rebuild(version, buckets)
        unpack_buckets([rebuilt])
        self.weights.keep([rebuilt])
        self.loaded[version] = rebuilt[1].copy()
        return version, snapshot_checksum([rebuilt[0]]), None

    def begin_attempt(self):
        self.weights.forget()


class Setting:
    """The real `WeightSync`, handles, server and ledger around fakes of trainer and engines."""

    def __init__(self, n=1, m=1, events=None, num_generators=2, deltas=False, probe_kl=None):
        prompts = (({"prompt_index": i}, 0) for i in range(10**6))
        self.ledger = Ledger(StalenessContract(9, 1), 50, prompts)
        self.ledger.events, self.events = events or EventOrder(), []
        self.ledger.events.listen(self.events.append)
        self.server = VLLMParameterServer()
        self.trainer = DeltaTrainer() if deltas else Trainer()
        self.engines = [DeltaEngine() if deltas else Engine() for _ in range(num_generators)]
        role = partial(stand_in_role, recover=lambda name: self.weights.recover(name))
        self.generators = [
            GeneratorHandle(role(f"generator_{i}", engine), self.ledger, limits())
            for i, engine in enumerate(self.engines)
        ]
        self.trainer_role = role("trainer_0", lambda: self.trainer)
        trainers = TrainersHandle([self.trainer_role], self.ledger, limits())
        server = role("server", lambda: self.server)
        self.server_handle = ParameterServerHandle(server, trainers, limits(), deltas=deltas)
        buffer = SimpleNamespace(role=SimpleNamespace(name="replay_buffer"))
        roles = Roles(self.generators, buffer, trainers, self.server_handle, None, None)
        options = {"push_early": lambda step: step == 5, "probe_kl": probe_kl}
        options |= {"push_every_n_steps": n, "pull_every_m_rollouts": m}
        self.weights = WeightSync(self.ledger, roles, **options)

    async def step(self, skipped=False):
        """Train, push if due, and say what is published."""
        self.trainer.version += not skipped
        await self.weights.push_if_due(self.trainer.version)
        self.ledger.finish_step(self.trainer.version)
        return self.ledger.published_version

    async def rollout(self, generator):
        entry = await self.ledger.admit(generator.name, 1)
        await self.weights.pull_if_due(generator, entry)
        await self.ledger.drop([entry.group_id], "failed")
        return entry.start_version

    def named(self, name):
        """The events of one name, each without it and the attempt."""
        return [tuple(e.values())[2:] for e in self.events if e["event"] == name]


async def test_pushes_come_every_n_versions_and_before_an_evaluation():
    setting = Setting(n=3)
    assert [await setting.step() for _ in range(4)] == [0, 0, 3, 3]
    assert await setting.step() == 5  # an evaluation follows step 5
    assert await setting.step(skipped=True) == 5
    assert setting.named("push") == setting.named("publish") == [(3,), (5,)]


async def test_pulls_come_every_m_rollouts_once_there_is_something_newer():
    setting = Setting(m=2)
    first, second = setting.generators
    assert [await setting.rollout(first) for _ in range(3)] == [0, 0, 0]
    await setting.step()
    assert [await setting.rollout(first) for _ in range(2)] == [1, 1]
    await setting.step()
    assert [await setting.rollout(first) for _ in range(2)] == [2, 2]
    assert [await setting.rollout(second) for _ in range(3)] == [0, 0, 2]
    assert setting.engines[1].loaded == [(2, ("bucket 2",))]
    pulls = [("generator_0", "group 3"), ("generator_0", "group 5"), ("generator_1", "group 9")]
    assert setting.named("pull") == pulls
    loads = [("generator_0", 1), ("generator_0", 2), ("generator_1", 2)]
    assert setting.named("load") == [(*load, CHECKSUM, CHECKSUM) for load in loads]


async def test_a_group_that_needs_newer_weights_pulls_at_once_also_during_an_evaluation():
    setting = Setting(m=1)
    generator = setting.generators[0]
    await setting.rollout(generator)
    await setting.step()
    with setting.ledger.pin_weights():
        assert await setting.rollout(generator) == 0
        entry = await setting.ledger.admit("generator_0", 1)
        entry.needed_version = 1
        await setting.weights.pull_if_due(generator, entry)
        assert entry.start_version == 1


async def test_groups_that_wait_for_the_same_version_share_one_pull():
    setting = Setting()
    await setting.step()
    generator = setting.generators[0]
    entries = [await setting.ledger.admit("generator_0", 1) for _ in range(3)]
    for entry in entries:
        entry.needed_version = 1
    pulls = (setting.weights.pull_if_due(generator, entry) for entry in entries)
    await asyncio.gather(*pulls)
    assert [entry.start_version for entry in entries] == [1, 1, 1]
    assert len(setting.engines[0].loaded) == 1


async def test_other_bytes_than_the_pushed_are_an_error_and_no_load_is_recorded():
    setting = Setting()
    setting.engines[1].checksum = "abc"
    await setting.rollout(setting.generators[1])
    await setting.step()
    with pytest.raises(RuntimeError) as error:
        await setting.rollout(setting.generators[1])
    for part in ("generator_1", "version 1", "abc", CHECKSUM):
        assert part in str(error.value)
    assert setting.named("load") == []


async def test_a_generator_that_computes_other_logprobs_than_the_trainers_pushed_ends_the_run():
    setting = Setting(probe_kl=1e-4)
    for engine, logprobs in zip(setting.engines, ([-1.0, -2.0], [-1.5, -2.5]), strict=True):
        engine.probe = ProbeReading(logprobs, label=1, cached_tokens=0)
    for generator in setting.generators:
        assert await setting.rollout(generator) == 0  # nothing is pushed yet
    setting.trainer.version = 1
    await setting.weights.push_if_due(1, [-1.0, -2.0])
    setting.ledger.finish_step(1)
    assert await setting.rollout(setting.generators[0]) == 1
    with pytest.raises(DisagreementError, match=r"generator_1 pulled version 1"):
        await setting.rollout(setting.generators[1])


async def test_a_generator_with_other_weights_than_the_trainers_pushed_ends_the_run():
    setting, tensor = Setting(), torch.ones(3, dtype=torch.bfloat16)
    manifests = [pack_bucket([("layers.0.weight", n * tensor)])[0] for n in range(3)]
    setting.trainer.export_weights = lambda version: ("bucket", manifests[version])
    generator, engine = setting.generators[0], setting.engines[0]
    engine.checksum, layers = snapshot_checksum(manifests[1:2]), pushed_layers(manifests[1:2])
    engine.probe = ProbeReading([], 1, 0, layers)
    await setting.rollout(generator)
    await setting.step()
    assert await setting.rollout(generator) == 1
    engine.checksum, engine.probe = snapshot_checksum(manifests[2:]), replace(engine.probe, label=2)
    await setting.step()
    with pytest.raises(DisagreementError, match=r"pulled version 2.*layer 0 \(of version 1\)"):
        await setting.rollout(generator)


async def test_a_restarted_server_gets_what_it_had_again_unless_an_attempt_began():
    setting = Setting(deltas=True)
    server = setting.server_handle
    for _ in range(2):
        await setting.step()
    before, setting.server = await server.newest(), VLLMParameterServer()
    await server.role.replay_restart("died")
    assert await server.newest() == before and before[0] == len(before[1]) == 2
    setting.server = VLLMParameterServer()
    await server.begin_again()
    await server.role.replay_restart("died")
    with pytest.raises(RoleFailedError, match="no weights were pushed"):
        await server.newest()


async def test_a_restored_run_publishes_its_weights_and_every_living_generator_loads_them():
    setting = Setting(num_generators=3)
    setting.generators[1].role.lost = True
    for generator in setting.generators:
        generator.version = 7  # of the attempt that ended
    setting.trainer.version = 4
    await setting.weights.restore()
    restored = ["begin_attempt", (4, ("bucket 4",))]
    assert [engine.loaded for engine in setting.engines] == [restored, [], restored]
    assert setting.ledger.published_version == 4


@pytest.mark.parametrize("method", ["begin_attempt", "load_weights"])
async def test_a_generator_that_is_given_up_while_a_run_is_restored_is_left_out(method):
    setting = Setting()
    setting.trainer.version, lost = 4, setting.generators[0]
    lost.role._can_spare = lambda: True

    def fail(*_):
        raise KeyError("no such thing")

    setattr(setting.engines[0], method, fail)
    await setting.weights.restore()
    assert [generator.lost for generator in setting.generators] == [True, False]
    assert setting.engines[1].loaded == ["begin_attempt", (4, ("bucket 4",))]
    assert (("generator_0", "restore") in setting.named("pull")) == (method == "load_weights")


async def test_generators_rebuild_every_version_from_what_they_hold():
    """One pulls each version, one every third; a process that is replaced begins anew."""
    setting = Setting(m=1, deltas=True)
    often, seldom = setting.generators
    for generator in setting.generators:
        await setting.rollout(generator)
    for step in range(1, 8):
        await setting.step()
        await setting.rollout(often)
        if step % 3 == 0:
            await setting.rollout(seldom)
    first, second = setting.engines
    assert sorted(first.loaded) == list(range(1, 8)) and sorted(second.loaded) == [3, 6]
    for engine in setting.engines:
        for version, raw in engine.loaded.items():
            assert raw.tobytes() == setting.trainer.pushed[version][1].tobytes()
    whole = len(setting.trainer.pushed[1][1])
    assert [len(sizes) for sizes in first.sizes] == [1] * 7
    assert first.sizes[0] == [whole] and all(size < whole / 20 for [size] in first.sizes[1:])
    assert [len(sizes) for sizes in second.sizes] == [3, 3]
    first.weights = RebuiltWeights()  # a new process
    await often.role.replay_restart("died")
    assert [size == whole for size in first.sizes[-1]] == [True] + [False] * 6


async def test_a_new_attempt_begins_with_a_whole_push_although_versions_come_again():
    setting = Setting(m=1, deltas=True)
    generator, engine = setting.generators[0], setting.engines[0]
    await setting.rollout(generator)
    for _ in range(3):
        await setting.step()
        await setting.rollout(generator)
    setting.trainer, setting.server = DeltaTrainer(), VLLMParameterServer()
    for role in (setting.trainer_role, setting.server_handle):
        await role.begin_again()
    setting.trainer.version = 2
    await setting.weights.restore()
    assert engine.sizes[-1] == [len(setting.trainer.pushed[2][1])]
    await setting.rollout(generator)
    await setting.step()
    await setting.rollout(generator)
    assert len(engine.sizes[-1]) == 1 and engine.sizes[-1][0] < engine.sizes[-2][0]
    assert engine.loaded[3].tobytes() == setting.trainer.pushed[3][1].tobytes()


async def restarts(setting):
    """Restart a generator twice: before any push, and after one, so that only the second pulls."""
    generator = setting.generators[0]
    await generator.role.replay_restart("died")
    await setting.rollout(generator)
    await setting.step()
    await generator.role.replay_restart("died")


async def rollouts(setting):
    await setting.step()
    assert [await setting.rollout(setting.generators[0]) for _ in range(3)] == [0, 0, 1]


@pytest.mark.parametrize(("happen", "cause"), [(restarts, "restart 2"), (rollouts, "group 2")])
def test_a_replay_pulls_where_the_run_did_that_it_repeats(happen, cause):
    """With its own period it would pull before the first rollout."""
    original = Setting(m=2)
    asyncio.run(happen(original))
    assert original.named("pull") == [("generator_0", cause)]
    assert [version for version, _ in original.engines[0].loaded] == [1]
    recorded = [event | {"number": i} for i, event in enumerate(original.events)]
    replay = Setting(m=1, events=EventOrder(recording=RecordedOrder(recorded, 9.0)))
    asyncio.run(happen(replay))
    assert replay.ledger.events.recording.summary()
    assert replay.engines[0].loaded == original.engines[0].loaded


async def test_a_group_whose_generator_restarts_while_it_pulls_starts_with_no_older_version():
    setting = Setting()
    await setting.step()
    generator, entry = setting.generators[0], await setting.ledger.admit("generator_0", 1)
    entry.needed_version = 1

    def restarts_after_the_load(event):
        if event["event"] == "load":
            generator.version = 0

    setting.ledger.events.listen(restarts_after_the_load)
    await setting.weights.pull_if_due(generator, entry)
    assert entry.start_version == entry.needed_version == 1


# ---- which pushes are whole -------------------------------------------------------------------

WHOLE = 1000


class Trainers:
    """Two ranks, whose shares of each delta have given sizes."""

    def __init__(self, sizes):
        self._sizes = sizes
        self.bases, self.reads = [], 0

    def export_weights(self, version, base):
        self.bases.append(base)
        delta = (None, 0) if base in (None, NO_BASE) else (0, self._sizes[version] // 2)
        manifest = (TensorEntry("a", "uint8", (), 0, WHOLE // 2, 0, *delta),)
        return [(version, rank) for rank in range(2)], [manifest, manifest]

    async def manifests(self, references):
        self.reads += 1
        return references

    async def gather_weights(self):
        return len(self.bases)


def push_all(trainers, deltas, count, forgets=()):
    """Push `count` times; return for each the size in the metrics, and what the server has."""

    async def run():
        role = stand_in_role("server", VLLMParameterServer)
        server, found = ParameterServerHandle(role, trainers, limits(), deltas=deltas), []
        for version in range(count):
            if version in forgets:
                await server.begin_again()
            await server.push(await server.begin())
            found.append((server.nbytes, (await server.newest())[1]))
        return found

    return asyncio.run(run())


SIZES = st.one_of(st.integers(0, 20), st.integers(0, 100), st.integers(0, WHOLE))


@given(st.lists(SIZES.map(lambda size: 2 * (size // 2)), min_size=1, max_size=80), st.data())
def test_a_chain_begins_whole_and_has_every_link_up_to_its_bounds(sizes, data):
    count = len(sizes)
    forgets = data.draw(st.sets(st.integers(0, count - 1), max_size=2))
    trainers = Trainers(sizes)
    chains = [chain for _, chain in push_all(trainers, True, count, forgets)]
    for version, (base, chain) in enumerate(zip(trainers.bases, chains, strict=True)):
        first = chain[0][0]
        assert chain == [(n, rank) for n in range(first, version + 1) for rank in range(2)]
        assert trainers.bases[first] == NO_BASE
        if base == NO_BASE:
            assert first == version
            continue
        assert base == version - 1 and version not in forgets
        earlier = sizes[first + 1 : version]
        assert len(earlier) < MAX_DELTAS
        assert not earlier or sum(earlier) + earlier[-1] <= WHOLE
    again = Trainers(sizes)
    assert [chain for _, chain in push_all(again, True, count, forgets)] == chains


def test_a_push_is_whole_again_only_once_the_chain_is_as_long():
    trainers = Trainers([400] * 8)
    push_all(trainers, True, 8)
    assert [base == NO_BASE for base in trainers.bases] == [True, False, False] * 2 + [True, False]
    few = Trainers([2] * (MAX_DELTAS + 3))
    push_all(few, True, MAX_DELTAS + 3)
    whole = [version for version, base in enumerate(few.bases) if base == NO_BASE]
    assert whole == [0, MAX_DELTAS + 1]


def test_whole_pushes_have_no_base_and_nobody_waits_for_their_sizes_again():
    trainers = Trainers([])
    found = push_all(trainers, False, 9, forgets={4})
    assert trainers.bases == [None] * 9
    assert [nbytes for nbytes, _ in found] == [0] + [WHOLE] * 8
    assert all(len(chain) == 2 for _, chain in found)
    assert trainers.reads == 2  # the first of each attempt
    found = push_all(Trainers([0, 30, 50, 0]), True, 4)
    assert [nbytes for nbytes, _ in found] == [0, WHOLE, 30, 50], "that of the push before"
