"""A finished run is replayed bit for bit, whatever its interleaving was; others are refused."""

import asyncio
import json
import random
import tempfile
import threading
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from lib.properties import many
from lib.trajectories import response
from omegaconf import OmegaConf

from grpo_components._plugin import recipes_folder
from grpo_components.config.reading import read_settings
from grpo_components.config.replayed import available_cpus
from grpo_components.errors import ConfigError, ReplayError, ReplayStop
from grpo_components.exchange.event_order import FORMAT, EventOrder
from grpo_components.exchange.group_reuse import GroupReuse
from grpo_components.exchange.ledger import Ledger
from grpo_components.exchange.replay_buffer import ReplayBuffer
from grpo_components.exchange.staleness import StalenessContract
from grpo_components.records.journal import Journal
from grpo_components.records.receipts import Receipts
from grpo_components.rollout.schedule import STOP, open_schedule
from grpo_components.training.step_result import StepResult
from grpo_components.trajectory import pack, summarize
from grpo_tools.audit.__main__ import audit
from grpo_tools.replay.check import check_replay
from grpo_tools.replay.recorded_run import Replay, read_events

# ---- whole runs with fakes of the roles ---------------------------------------------------------

GROUP_SIZE, NUM_STEPS = 2, 5


@dataclass(frozen=True)
class Plan:
    """What a run's config fixes."""

    max_staleness: int
    groups_per_step: int
    push_every: int
    pull_every: int
    num_generators: int
    rollouts_in_flight: int
    wait: bool
    reuses: bool = False
    """Whether half of each batch may have been trained before."""


@st.composite
def plans(draw):
    eta = draw(st.integers(0, 3))
    return Plan(
        max_staleness=eta,
        groups_per_step=draw(st.integers(1, 3)),
        push_every=draw(st.integers(1, eta + 1)),
        pull_every=draw(st.integers(1, 3)),
        num_generators=draw(st.integers(1, 2)),
        rollouts_in_flight=draw(st.integers(1, 3)),
        wait=draw(st.booleans()),
        reuses=draw(st.booleans()),
    )


def answer(future, result):
    if not future.cancelled():
        future.set_result(result)


def mixed(*values):
    """A number that every bit of the values decides."""
    return xxhash.xxh3_64_intdigest(json.dumps(values).encode())


class Engine:
    """Samples as a real one does: what enters before which step decides every token."""

    def __init__(self, number, folder, replay, pace):
        recorded = replay and replay.read_schedule
        self.schedule = open_schedule(str(folder / "logs"), recorded, number=number)
        self.pace, self.loop = pace, asyncio.get_running_loop()
        self.weights, self.version, self.running = 0, 0, {}
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def submit(self, name, payload):
        future = self.loop.create_future()
        self.schedule.put(name, (name, payload, future))
        return future

    def run(self):
        step = 0
        while True:
            while command := self.schedule.take(step, idle=not self.running):
                name, payload, future = command
                if name == STOP:
                    self.loop.call_soon_threadsafe(answer, future, None)
                    return
                if payload is not None:
                    self.version, self.weights = payload
                    self.loop.call_soon_threadsafe(answer, future, None)
                else:
                    self.running[name] = future, []
            time.sleep(self.pace.random() * 3e-4)
            step += 1
            for name, (future, tokens) in list(self.running.items()):
                # The step's mates are part of every token, as the width of a batch can be.
                tokens.append((mixed(name, self.weights, sorted(self.running)) % 97, self.version))
                straggles = mixed(name, "long") % 7 == 0
                if len(tokens) >= (40 if straggles else 4 + mixed(name) % 8):
                    del self.running[name]
                    self.loop.call_soon_threadsafe(answer, future, tokens)

    async def close(self):
        await self.submit(STOP, None)
        self.thread.join()
        self.schedule.close()


class Generator:
    def __init__(self, number, engine, lock):
        self.name, self.engine, self.pulling = f"generator_{number}", engine, lock
        self.version = self.rollouts_since_pull = 0


class Checkpoints:
    """Keeps the state of a run in memory."""

    def __init__(self, run):
        self.run, self.saved = run, None

    def hold(self):
        run = self.run
        stored = [run.groups[entry.group_id] for entry in run.ledger.stored()]
        state = json.loads(json.dumps(run.ledger.state_dict()))
        self.held = state, stored, run.weights

    async def save(self, step, trainers, buffer, batch):
        await self.run.work(8)
        self.saved = self.held

    async def finish(self):
        pass


class Run:
    """The recipe's loops around the real ledger, buffer, receipts, events and schedules."""

    def __init__(self, plan, folder, seed, replayed=None, replay_until=None, before=None):
        self.plan, self.folder, self.replay = plan, folder, replayed and Replay(replayed, 40.0)
        self.random, self.before = random.Random(seed), before
        (folder / "logs").mkdir(parents=True, exist_ok=before is not None)
        contract = StalenessContract(plan.max_staleness, plan.groups_per_step)
        first = before[0]["issued"] if before else 0
        prompts = (({"prompt_index": i}, 0) for i in range(first, 10**6))
        self.ledger = Ledger(contract, NUM_STEPS, prompts)
        if plan.reuses and plan.max_staleness:
            self.ledger.reuse = GroupReuse(contract, 0.5, 3)
        attempt, self.groups = int(before is not None), {}
        if before:
            self.ledger.load_state_dict(before[0])
        self.events = EventOrder(attempt, self.replay and self.replay.order)
        self.ledger.events = self.events
        self.buffer = ReplayBuffer(contract=contract, timeout_s=20)
        settings = {
            "max_staleness": plan.max_staleness,
            "groups_per_step": plan.groups_per_step,
            "group_size": GROUP_SIZE,
            "cpus": 1,
            **self.ledger.reuse.describe(),
        }
        receipts = Receipts(folder / "receipts.jsonl", self.ledger, attempt, settings)
        self.checkpoints = Checkpoints(self)
        parts = (MagicMock(), self.ledger, MagicMock(), receipts, self.checkpoints)
        options = {"save_every_n_steps": NUM_STEPS + 1, "replay_until": replay_until}
        self.journal = Journal(*parts, **options)
        self.weights = before[2] if before else 0
        self.served, self.server = (0, 0), asyncio.Lock()
        self.trained, self.spanning = [], 0

    async def main(self):
        pace = random.Random(self.random.random())
        engines = [
            Engine(number, self.folder, self.replay, pace)
            for number in range(self.plan.num_generators)
        ]
        lock = nullcontext if self.replay else asyncio.Lock
        self.generators = [Generator(i, e, lock()) for i, e in enumerate(engines)]
        if self.before:
            await self.restore()
        try:
            async with asyncio.TaskGroup() as loops:
                loops.create_task(self.training_loop())
                for generator in self.generators:
                    loops.create_task(self.rollout_loop(generator, loops))
        finally:
            for engine in engines:
                await engine.close()
        self.journal.close()
        self.summary = self.replay.order.summary() if self.replay else ""

    async def restore(self):
        self.groups |= {summary.group_id: (group, summary) for group, summary in self.before[1]}

        def parts(entries):
            return [part for entry in entries for part in self.groups[entry.group_id]]

        await self.buffer.refill(*parts(self.ledger.in_state("buffered")))
        self.buffer.keep(*parts(self.ledger.reuse.kept))
        await self.push(self.ledger.policy_version)
        for generator in self.generators:
            generator.version = -1
            await self.pull(generator, "restore")

    async def work(self, turns=4):
        for _ in range(self.random.randint(0, turns)):
            await asyncio.sleep(self.random.choice([0, 0, 2e-4]))

    async def rollout_loop(self, generator, loops):
        room = asyncio.Semaphore(self.plan.rollouts_in_flight)
        while True:
            if not self.replay:
                await room.acquire()
            entry = await self.ledger.admit(generator.name, 20)
            if entry is None:
                return
            loops.create_task(self.rollout(generator, entry, room))

    async def rollout(self, generator, entry, room):
        await self.pull_if_due(generator, entry)
        names = [f"group {entry.group_id} sample {i}" for i in range(GROUP_SIZE)]
        group = [
            self.trajectory(entry, await sampled)
            for sampled in [generator.engine.submit(name, None) for name in names]
        ]
        room.release()
        await self.work()
        summary = summarize(pack(group))
        self.spanning += summary.oldest_version != summary.newest_version
        await self.ledger.finish_generation(entry.group_id, summary.response_tokens)
        if mixed(entry.group_id, "failed") % 11 == 0:
            await self.ledger.drop([entry.group_id], "failed")
        elif mixed(group[0].response_ids.tolist()) % 7 == 0:
            await self.ledger.drop([entry.group_id], "filtered")
        else:
            await self.work()
            self.groups[entry.group_id] = pack(group), summary
            await self.buffer.add(pack(group), summary)
            await self.work()
            await self.ledger.enter_buffer(entry.group_id)

    def trajectory(self, entry, tokens):
        ids, versions = zip(*tokens, strict=True)
        return response(
            entry.group_id,
            versions,
            response_ids=np.array(ids),
            prompt_index=entry.prompt_index,
            epoch=entry.epoch,
            temperature=1.0 + entry.target_step,
            reward=float(ids[0] % 3),
        )

    async def pull_if_due(self, generator, entry):
        def due():
            by_count = generator.rollouts_since_pull >= self.plan.pull_every
            newer = generator.version < self.ledger.published_version
            return (by_count and newer) or generator.version < entry.needed_version

        if self.replay or due():
            async with generator.pulling:
                if self.replay or due():
                    await self.pull(generator, f"group {entry.group_id}")
        generator.rollouts_since_pull += 1
        entry.start_version = generator.version

    async def pull(self, generator, cause):
        generator.rollouts_since_pull = 0
        if await self.ledger.should_pull(generator.name, generator.version, cause):
            async with self.server:  # calls are answered in the order in which they were made
                await self.work()
                version, weights = self.served
            await generator.engine.submit(f"weights {version}", (version, weights))
            generator.version = version
            loaded = {"version": version, "checksum": str(weights), "published": str(weights)}
            self.events.note("load", role=generator.name, **loaded)
            await self.work()

    async def push(self, version):
        await self.work()
        await self.events.take("push", version=version)
        async with self.server:
            await self.work()
            self.served = version, self.weights
        await self.ledger.publish(version)

    async def evaluate(self, step):
        """Holds each generator's weights until its answers are there, as the recipe does."""

        async def share(generator):
            async with generator.pulling:
                await self.pull(generator, f"evaluation {step}")
                names = [f"evaluation of prompt {i}" for i in range(2)]
                for sampled in [generator.engine.submit(name, None) for name in names]:
                    versions = {version for _, version in await sampled}
                    assert len(versions) == 1, "the weights changed during an evaluation"

        await asyncio.gather(*(share(generator) for generator in self.generators))

    async def training_loop(self):
        ledger = self.ledger
        await self.evaluate(ledger.steps_done)
        while not ledger.finished:
            taken = None
            while not (taken and taken.groups):
                if self.plan.wait:
                    await ledger.until_none_is_doomed(self.plan.groups_per_step, 20)
                arguments = *ledger.next_batch(self.plan.groups_per_step), ledger.reuse.ids
                _, taken = await self.buffer.take(*arguments)
                stale = [group.group_id for group in taken.dropped]
                await ledger.drop(stale, "stale", reissue=True)
            ids = [group.group_id for group in taken.groups]
            entries = await ledger.take(ids, (), taken.groups)
            await self.work(8)
            step, skipped = ledger.steps_done + 1, mixed(taken.batch_hash) % 8 == 0
            version = ledger.policy_version + (not skipped)
            if not skipped:
                self.weights = mixed(self.weights, taken.batch_hash, step, self.objective)
            evaluating = step % 3 == 0
            if version - ledger.published_version >= (1 if evaluating else self.plan.push_every):
                await self.push(version)
            versions, tokens = Counter[int](), {}
            for group in taken.groups + taken.reused:
                number = sum(group.response_tokens)
                versions[group.oldest_version] += number
                tokens[group.group_id] = {"skipped" if skipped else "trained": number}
            metrics = {"off_policy/correction_mass": 1.0}
            parts = version, versions, {}, versions.total(), "", metrics
            result = StepResult(*parts, group_tokens=tokens)
            await self.journal.commit(taken.batch_hash, result)
            self.trained.append([entry.group_id for entry in entries])
            if evaluating:
                await self.evaluate(step)
            await self.journal.save_if_due(step, MagicMock(), None)


async def make_and_run(*args, objective="recorded", **kwargs):
    run = Run(*args, **kwargs)
    run.objective = objective
    try:
        await run.main()
    except* ReplayStop:
        run.journal.close()
    return run


def hashes_of(folder):
    return [event["batch_hash"] for event in read_events(folder) if event["event"] == "step"]


def checksums_of(folder):
    loads = [event for event in read_events(folder) if event["event"] == "load"]
    return {event["version"]: event["checksum"] for event in loads}


def plain(events):
    ordered = [e for e in events if e["event"] not in ("start", "load")]
    return [{k: v for k, v in e.items() if k not in ("time", "number", "chain")} for e in ordered]


@settings(max_examples=many(20), deadline=None)
@given(plans(), st.integers(0, 2**32), st.integers(0, 2**32))
def test_any_run_is_replayed_to_the_same_weights_at_any_pace(plan, seed, other_seed):
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / part for part in ("original", "replay")]
        first = asyncio.run(make_and_run(plan, folders[0], seed))
        second = asyncio.run(make_and_run(plan, folders[1], other_seed, folders[0]))
        logs = [plain(read_events(folder)) for folder in folders]
        hashes = [hashes_of(folder) for folder in folders]
    assert first.summary == "" and second.summary.endswith("events in the recorded order")
    assert logs[0] == logs[1]
    assert len(hashes[0]) == NUM_STEPS and hashes[0] == hashes[1]
    assert first.trained == second.trained
    assert first.weights == second.weights


def test_the_pace_alone_does_make_another_run():
    """So the test above compares what could differ."""
    plan = Plan(3, 2, 1, 1, 2, 3, False)
    with tempfile.TemporaryDirectory() as name:
        runs = [asyncio.run(make_and_run(plan, Path(name) / str(seed), seed)) for seed in range(3)]
    assert len({run.weights for run in runs}) > 1
    assert any(run.spanning for run in runs)


@settings(max_examples=many(20), deadline=None)
@given(plans(), st.integers(1, NUM_STEPS - 1), st.integers(0, 2**32))
def test_a_replay_of_some_steps_is_resumed_with_another_objective(plan, until, seed):
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / part for part in ("original", "replay")]
        asyncio.run(make_and_run(plan, folders[0], seed))
        first = asyncio.run(make_and_run(plan, folders[1], seed + 1, folders[0], until))
        assert first.ledger.steps_done == until, "no step ran that may differ"
        before, last = first.checkpoints.saved, folders[1]
        options = {"before": before, "objective": "another"}
        second = asyncio.run(make_and_run(plan, last, seed + 2, **options))
        hashes = [hashes_of(folder) for folder in folders]
        original, there = (checksums_of(folder) for folder in folders)
        report, summary = audit(folders[1] / "receipts.jsonl")
    assert report.broken.keys() <= {"config"}, (report.broken, summary)  # it has no config
    assert hashes[0][:until] == hashes[1][:until]
    same = original.keys() & there.keys()
    version = before[0]["policy_version"]
    assert all(original[v] == there[v] for v in same if v <= version)
    assert second.ledger.finished and len(hashes[1]) == NUM_STEPS
    assert not any(original[v] == there[v] for v in same if v > version)


def test_a_batch_that_differs_is_told_with_its_step(tmp_path):
    plan = Plan(1, 2, 1, 1, 1, 2, False)
    asyncio.run(make_and_run(plan, tmp_path / "original", 1))
    path = tmp_path / "original" / "receipts.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    next(r for r in records if r["event"] == "step" and r["step"] == 3)["batch_hash"] = "0"
    write(path, *records)
    with pytest.raises(ExceptionGroup) as failed:
        asyncio.run(make_and_run(plan, tmp_path / "replay", 2, tmp_path / "original"))
    [error] = failed.value.exceptions
    assert isinstance(error, ReplayError) and "in step 3: its batch" in str(error)


# ---- what can be replayed -----------------------------------------------------------------------


@pytest.fixture
def values(tmp_path):
    """A checked config that names a finished run."""
    base, run = tmp_path / "base", tmp_path / "finished"
    tiny = OmegaConf.load(recipes_folder() / "configs" / "tiny_async_grpo.yaml")
    tiny.output_dir, tiny.base_model_path = str(run), str(base)
    config = read_settings(OmegaConf.to_container(tiny, resolve=True)).model_dump()
    (run / "logs").mkdir(parents=True)
    OmegaConf.save(config, run / "config.yaml")
    (run / "logs" / "schedule_generator_0.jsonl").touch()
    write(run / "receipts.jsonl", START, END)
    elsewhere = json.dumps(config).replace(str(run), str(tmp_path / "new"))
    return json.loads(elsewhere) | {"replay_events": str(run)}


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def check(values):
    check_replay(read_settings(values), read_settings)


def refused_key(values):
    with pytest.raises(ConfigError) as refused:
        check(values)
    return refused.value.key


def test_a_finished_run_can_be_replayed_by_its_folder_or_its_log_and_with_other_cpus(values):
    check(values | {"log_level": "ERROR", "replay_until": values["num_steps"]})
    for more in ("", "/receipts.jsonl"):
        given = values | {"replay_events": values["replay_events"] + more}
        check(given)
        assert available_cpus(read_settings(given)) == 5


def test_the_base_model_may_lie_elsewhere(values):
    base = values["base_model_path"]
    assert refused_key(values | {"base_model_path": "/elsewhere"}) == "tokenizer.path"
    check(json.loads(json.dumps(values).replace(base, "/elsewhere")))


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("device", {"device": "cuda"}),
        ("resume_from_checkpoint", {"resume_from_checkpoint": True}),
        ("max_staleness", {"max_staleness": 1}),
        ("replay_until", {"replay_until": 10**6}),
        ("replay_until", {"replay_until": 1, "replay_events": None}),
    ],
)
def test_a_key_that_matters_is_named(values, key, changes):
    assert refused_key(values | changes) == key


def test_the_folder_of_the_run_to_replay_is_not_moved_aside(values):
    assert refused_key(values | {"output_dir": values["replay_events"]}) == "output_dir"


FILES = ("config.yaml", "receipts.jsonl", "logs/schedule_generator_0.jsonl")
START = {"event": "start", "attempt": 0, "cpus": 5, "format": FORMAT}
RESTART = {"event": "restart", "attempt": 0, "role": "generator_0"}
END = {"event": "end", "attempt": 0, "finished": True}


@pytest.mark.parametrize(
    ("file", "events"),
    [
        *((name, None) for name in FILES),
        ("receipts.jsonl", [START, END | {"finished": False}]),
        ("receipts.jsonl", [START]),
        ("receipts.jsonl", [START, {"event": "rollback", "attempt": 0}, END]),
        ("receipts.jsonl", [START, START | {"attempt": 1}, END]),
        ("receipts.jsonl", [START, RESTART | {"given_up": True}, END]),
        ("receipts.jsonl", [START | {"format": 1}, END]),
    ],
)
def test_a_run_that_lacks_something_is_refused(values, file, events):
    """A file, its end, or an undisturbed course."""
    path = Path(values["replay_events"]) / file
    path.unlink()
    if events is not None:
        write(path, *events)
    assert refused_key(values) == "replay_events"


def test_a_run_with_restarts_can_be_replayed(values):
    path = Path(values["replay_events"]) / "receipts.jsonl"
    write(path, START, RESTART | {"given_up": False}, END)
    check(values)
