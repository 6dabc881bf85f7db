"""The contract at its edges, and kept by ledger and buffer in random schedules of whole runs."""

import asyncio
import random
import tempfile
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from lib.properties import many
from lib.trajectories import response

from grpo_components.data.curriculum import PromptCurriculum
from grpo_components.data.prompt_stream import PromptStream
from grpo_components.exchange.group_reuse import GroupReuse
from grpo_components.exchange.ledger import Ledger
from grpo_components.exchange.replay_buffer import ReplayBuffer
from grpo_components.exchange.staleness import Reused, StalenessContract
from grpo_components.records.journal import Journal
from grpo_components.records.receipts import Receipts
from grpo_components.settings import CurriculumSettings, Settings
from grpo_components.state_files import read_state, write_state
from grpo_components.training.sample import make_samples
from grpo_components.training.step_result import StepResult
from grpo_components.training.token_use import TokenUse
from grpo_components.trajectory import pack, summarize, unpack
from grpo_tools.audit.__main__ import audit

pytestmark = pytest.mark.anyio


@given(st.integers(0, 5), st.integers(1, 9), st.integers(0, 50), st.integers(0, 60))
def test_a_group_trained_in_its_own_step_is_never_too_old(eta, groups_per_step, version, ahead):
    contract = StalenessContract(eta, groups_per_step)
    needed = contract.needed_version(version, ahead)
    step = (version * groups_per_step + ahead) // groups_per_step
    assert contract.step_of(version, ahead) == step
    assert contract.may_train(needed, step) and contract.oldest_trainable(step) == needed
    assert not contract.may_train(needed - 1, step)
    assert contract.staleness(needed, step) == eta


@given(st.integers(0, 5), st.integers(1, 9), st.integers(0, 50))
def test_admission_lets_in_as_many_groups_as_the_buffer_has_room_for(eta, groups_per_step, version):
    """With the newest weights published; one group more would have to wait for newer ones."""
    contract = StalenessContract(eta, groups_per_step)
    most = contract.max_living_groups
    assert contract.needed_version(version, most - 1) <= version
    assert contract.needed_version(version, most) > version


def test_a_step_waits_only_if_not_all_groups_in_flight_could_be_trained_later():
    contract = StalenessContract(max_staleness=1, groups_per_step=2)
    assert contract.must_wait([5, 5], [4], policy_version=5)  # this step is its last chance
    # The next step has room for two, but not for three.
    assert not contract.must_wait([5, 5], [5, 5], policy_version=5)
    assert contract.must_wait([5, 5], [5, 5, 5], policy_version=5)
    assert not contract.must_wait([5, 5, 5], [], policy_version=5)  # nothing to wait for


@given(st.integers(0, 4), st.integers(1, 9), st.integers(0, 4), st.data())
def test_whatever_later_steps_reuse_a_group_is_trained_by_the_step_it_is_admitted_for(
    eta, groups_per_step, steps_left, data
):
    """Played step by step, with any number of reused groups from none to the most."""
    most = data.draw(st.integers(0, groups_per_step - 1))
    counts = st.integers(0, most)
    reused = Reused(data.draw(counts), most)
    contract = StalenessContract(eta, groups_per_step)
    needed = contract.groups_of(steps_left, reused)
    last = [contract.step_of(0, ahead, reused) for ahead in range(needed)]
    assert max(last, default=0) == max(0, steps_left - 1)  # and the next group, a step later
    assert steps_left == 0 or contract.step_of(0, needed, reused) == steps_left
    ahead, step, count = 0, 0, reused.next
    while ahead < needed:
        taken = groups_per_step - count
        assert all(step <= last[number] for number in range(ahead, min(ahead + taken, needed)))
        ahead, step, count = ahead + taken, step + 1, data.draw(counts)
    assert contract.groups_of(eta + 1, reused) <= contract.max_living_groups


GROUP_SIZE, NUM_STEPS, TIMEOUT_S = 2, 8, 20.0


@dataclass
class Generator:
    """A generator as the recipe sees it, with a random speed."""

    name: str
    turns_per_token: int
    version: int = 0
    rollouts_since_pull: int = 0
    restarts: int = 0
    pulling: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(frozen=True)
class Schedule:
    """One random run."""

    max_staleness: int
    groups_per_step: int
    push_every: int
    pull_every: int
    speeds: list[int]
    rollouts_in_flight: int
    wait: bool
    stale_tokens: str
    curriculum: bool
    """Whether prompts are drawn by their success rates."""
    reuse: tuple[float, int]
    """Share of a batch that is reused, and how many steps train a group at most."""
    rates: dict[str, float]
    """Of groups that fail, straggle or are filtered, of generator restarts, of skipped steps."""
    seed: int


@st.composite
def schedules(draw):
    eta = draw(st.integers(0, 3))
    rates = {"failed": 0.1, "filtered": 0.2, "restart": 0.05, "skipped": 0.2, "straggles": 0.1}
    return Schedule(
        max_staleness=eta,
        groups_per_step=draw(st.integers(1, 3)),
        push_every=draw(st.integers(1, eta + 1)),
        pull_every=draw(st.integers(1, 9)),
        speeds=draw(st.lists(st.integers(0, 12), min_size=1, max_size=3)),
        rollouts_in_flight=draw(st.integers(1, 4)),
        wait=draw(st.booleans()),
        stale_tokens=draw(st.sampled_from(["drop", "mask"])),
        curriculum=draw(st.booleans()),
        reuse=draw(st.sampled_from([(0.0, 1), (0.34, 3), (0.5, 2), (0.7, 2), (0.7, 9)])),
        rates={name: draw(st.sampled_from([0, rate])) for name, rate in rates.items()},
        seed=draw(st.integers(0, 2**32)),
    )


class Killed(Exception):
    """A process was killed, at any turn."""


class Run:
    """The recipe's two loops around the real ledger, buffer and receipts; the rest is random.

    It saves after every third step, and continues from where an earlier run saved last.
    """

    def __init__(self, schedule, folder, attempt=0, turns=None, earlier=None):
        s = self.schedule = schedule
        contract = StalenessContract(s.max_staleness, s.groups_per_step)
        self.attempt, self.folder, self.turns = attempt, folder, turns
        rows, seed = [{"prompt_index": i} for i in range(7)], s.seed % 2**30
        self.prompts = PromptStream(rows, shuffle=True, seed=seed)
        if s.curriculum:
            self.prompts = PromptCurriculum(
                rows, CurriculumSettings(low=0.3, high=0.7, floor=0.1, decay=0.9), seed
            )
        self.ledger = Ledger(contract, NUM_STEPS, self.prompts)
        if s.max_staleness:
            self.ledger.reuse = GroupReuse(contract, *s.reuse)
        if s.curriculum:
            self.ledger.events.listen(self.prompts.follow)
        self.ledger.events.attempt = attempt
        self.buffer = ReplayBuffer(
            contract=contract, timeout_s=TIMEOUT_S, stale_tokens=s.stale_tokens
        )
        self.trained, self.saved = [], earlier and earlier.saved
        self.uses = Counter()
        """How often each group was trained in this attempt."""
        if self.saved:
            driver = read_state(Path(self.saved), "driver")
            self.prompts.load_state_dict(driver["prompts"])
            self.ledger.load_state_dict(driver["ledger"])
            self.trained = earlier.trained[: self.ledger.trained_groups]
        settings = {
            "max_staleness": s.max_staleness,
            "groups_per_step": s.groups_per_step,
            "group_size": GROUP_SIZE,
            **(self.prompts.describe() if s.curriculum else {}),
            **self.ledger.reuse.describe(),
        }
        self.receipts = Receipts(folder / "receipts.jsonl", self.ledger, settings)
        cfg = Settings.model_construct(output_dir=str(folder), save_every_n_steps=3)
        parts = (self.ledger, self.prompts, self.receipts)
        self.journal = Journal(cfg, MagicMock(), *parts, MagicMock())
        self.journal.save = self.save
        self.generators = [Generator(f"generator_{i}", v) for i, v in enumerate(s.speeds)]
        self.random = random.Random(s.seed + attempt)
        self.buffered_at, self.waited = {}, {}
        self.filters = False
        """Whether groups that succeed or fail as a whole are filtered."""

    async def main(self):
        if self.saved:
            buffered, stored = self.ledger.in_state("buffered"), self.ledger.stored()
            *parts, _, _ = self.buffer.read_state(self.saved, [e.group_id for e in stored])
            for entry in stored:
                entry.parts, parts = parts[:2], parts[2:]
            await self.buffer.refill(*parts_of(buffered))
            for entry in buffered:
                self.buffered_at[entry.group_id] = self.ledger.policy_version
            # Restored weights are published and pulled before anything is sampled.
            version = self.ledger.policy_version
            await self.ledger.publish(version)
            for generator in self.generators if version else ():
                generator.version = version
                self.load(generator)
        async with asyncio.TaskGroup() as loops:
            loops.create_task(self.training_loop())
            for generator in self.generators:
                loops.create_task(self.rollout_loop(generator, loops))
        self.receipts.close()

    def load(self, generator):
        checksums = dict.fromkeys(("checksum", "published"), f"weights {generator.version}")
        loaded = {"role": generator.name, "version": generator.version, **checksums}
        self.ledger.events.note("load", **loaded)

    def happens(self, what):
        return self.random.random() < self.schedule.rates[what]

    async def work(self, turns):
        for _ in range(self.random.randint(0, turns)):
            if self.turns is not None:
                self.turns -= 1
                if self.turns <= 0:
                    raise Killed
            await asyncio.sleep(0)

    async def rollout_loop(self, generator, loops):
        room = asyncio.Semaphore(self.schedule.rollouts_in_flight * GROUP_SIZE)
        while True:
            for _ in range(GROUP_SIZE):
                await room.acquire()
            entry = await self.ledger.admit(generator.name, TIMEOUT_S)
            if entry is None:
                return
            loops.create_task(self.rollout(generator, entry, room))

    async def rollout(self, generator, entry, room):
        assert self.ledger.steps_done <= entry.target_step < NUM_STEPS
        restarts = generator.restarts
        await self.pull_if_due(generator, entry)
        group = []
        for _ in range(GROUP_SIZE):
            group.append(await self.respond(generator, entry))
            group[-1].reward = float(self.random.randint(0, 2))
            room.release()
        if self.happens("restart"):
            generator.restarts += 1
            generator.version, generator.rollouts_since_pull = 0, 10**6
        if generator.restarts != restarts:  # a restart loses what was in flight
            return await self.ledger.drop([entry.group_id], "failed", reissue=True)
        summary = summarize(pack(group))
        # The same for the same draw, whenever it is generated.
        chance = random.Random(f"{entry.prompt_index} {entry.epoch}")
        scored = [chance.random() < entry.prompt_index / 6 for _ in range(GROUP_SIZE)]
        result = scored if self.schedule.curriculum else None
        await self.ledger.finish_generation(entry.group_id, summary.response_tokens, result)
        if self.happens("failed"):
            await self.ledger.drop([entry.group_id], "failed")
        elif self.happens("filtered") or (self.filters and len(set(scored)) == 1):
            await self.ledger.drop([entry.group_id], "filtered")
        else:
            await self.work(3)
            entry.parts = (pack(group), summary)
            await self.buffer.add(*entry.parts)
            self.buffered_at[entry.group_id] = self.ledger.policy_version
            await self.ledger.enter_buffer(entry.group_id)

    async def respond(self, generator, entry):
        versions, turns = [], generator.turns_per_token
        if self.happens("straggles"):
            turns += 200
        for _ in range(self.random.randint(1, 4)):  # the weights may change between two tokens
            await self.work(turns)
            versions.append(generator.version)
        identity = {"prompt_index": entry.prompt_index, "epoch": entry.epoch}
        return response(entry.group_id, versions, **identity, attempt=self.attempt)

    async def pull_if_due(self, generator, entry):
        async with generator.pulling:
            newest = self.ledger.published_version
            by_count = generator.rollouts_since_pull >= self.schedule.pull_every
            newer = generator.version < newest
            if (by_count and newer) or generator.version < entry.needed_version:
                generator.rollouts_since_pull = 0
                await self.work(3)
                generator.version = newest
                self.load(generator)
        generator.rollouts_since_pull += 1
        entry.start_version = generator.version

    async def take_batch(self):
        groups, arguments = [], self.ledger.next_batch(self.schedule.groups_per_step)
        while not groups:
            if self.schedule.wait:
                await self.ledger.until_none_is_doomed(self.schedule.groups_per_step, TIMEOUT_S)
            batch, taken = await self.buffer.take(*arguments)
            stale = [group.group_id for group in taken.dropped]
            await self.ledger.drop(stale, "stale", reissue=True)
            self.note_waits(stale)
            groups = taken.groups
        return unpack(batch), taken

    async def training_loop(self):
        ledger, eta = self.ledger, self.schedule.max_staleness
        while not ledger.finished:
            batch, taken = await self.take_batch()
            ids = [group.group_id for group in taken.groups]
            entries = await ledger.take(ids, (), taken.groups)
            start, entries = ledger.policy_version, entries[: len(ids)]
            assert len(ids) + len(taken.reused) == self.schedule.groups_per_step
            self.note_uses(ids, taken.reused)
            versions = [v for t in batch for v in t.token_versions.tolist()]
            fresh = [v for v in versions if v >= start - eta]
            if self.schedule.stale_tokens == "drop":
                assert fresh == versions, "a stale token is in a batch"
            for group in taken.groups:
                assert group.newest_version >= start - eta, "a wholly stale group is in a batch"
            await self.work(20)
            after = start + (not self.happens("skipped"))
            if after - ledger.published_version >= self.schedule.push_every:
                await self.work(3)
                await ledger.publish(after)
            metrics = {"off_policy/correction_mass": 1.0}
            tokens = self.token_use(batch, start - eta, updated=after > start)
            result = StepResult(after, Counter(fresh), {}, len(fresh), "", metrics, (), tokens)
            step = await self.journal.commit(taken.batch_hash, result)
            self.note_waits(ids)
            self.trained += [(e.prompt_index, e.epoch) for e in entries]
            await self.work(5)  # an evaluation: the rollouts go on
            await self.journal.save_if_due(step, MagicMock(), None)

    def token_use(self, batch, oldest, updated):
        """What the trainers count of a batch."""
        use, packed = TokenUse(oldest, mask_overlong=False, corrects=False), pack(batch)
        samples = make_samples(packed, np.zeros(len(batch)), use.trained_tokens, 0)
        if updated:
            for sample in samples:
                sample.updated = True
        return use.count(samples, torch.device("cpu"), 1)

    async def save(self, step, roles, batch):
        """As `Journal` does."""
        folder = str(self.folder / f"{self.attempt}-{step}")
        await self.work(5)
        driver, buffered = self.journal.held
        write_state(Path(folder), "driver", driver)
        assert self.buffer.write_state(folder, batch, *buffered) is None
        self.saved = folder

    def note_uses(self, new, reused):
        """A group is in a batch once, and never too old or used too often."""
        ids = [*new, *(group.group_id for group in reused)]
        assert len(set(ids)) == len(ids)
        self.uses.update(ids)
        for group in reused:
            event("reused")
            assert len(set(group.rewards)) > 1
            assert self.uses[group.group_id] <= self.schedule.reuse[1]
            age = self.ledger.policy_version - group.oldest_version
            assert age <= self.schedule.max_staleness

    def note_waits(self, group_ids):
        for group_id in group_ids:
            # A group can be trained before the loop that buffered it runs on.
            buffered_at = self.buffered_at.get(group_id, self.ledger.policy_version)
            self.waited[group_id] = self.ledger.policy_version - buffered_at


def parts_of(entries):
    return [part for entry in entries for part in entry.parts]


@settings(max_examples=many(200))
@given(schedules())
def test_every_schedule_ends_within_the_bound_loses_nothing_and_passes_the_audit(schedule):
    """A time-out of ledger or buffer means a deadlock."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(schedule, Path(folder))
        asyncio.run(run.main())
        report, summary = audit(Path(folder) / "receipts.jsonl")
    assert not report.broken, summary
    assert report.checked["books"] > NUM_STEPS and "; residual 0/0\n" in summary
    assert_complete(run)
    ledger = run.ledger
    # No starvation: a buffered group is trained or dropped within max_staleness + 1 versions.
    assert max(run.waited.values()) <= schedule.max_staleness + 1
    if schedule.max_staleness == 0 or schedule.wait:
        assert not ledger.dropped_groups["stale"]
    for reason in +ledger.dropped_groups:
        event(f"dropped as {reason}")


def assert_complete(run):
    """No prompt is trained twice, and no group or prompt is left behind."""
    assert_trained_once(run)
    assert not run.ledger.living() and not run.ledger.waiting_prompts


def assert_trained_once(run):
    ledger = run.ledger
    assert len(set(run.trained)) == len(run.trained) == ledger.trained_groups
    ended = ledger.trained_groups + sum(ledger.dropped_groups.values())
    assert ledger.issued == ended + len(ledger.living())


@settings(max_examples=many(80), deadline=None)
@given(schedules(), st.lists(st.integers(1, 3000), min_size=1, max_size=3), st.data())
def test_after_kills_and_resumes_no_prompt_is_lost_or_trained_twice(schedule, kill_after, data):
    """From its last checkpoint, each time with another bound, batch size and generators."""
    with tempfile.TemporaryDirectory() as folder:
        run, smaller = None, False
        for attempt, turns in enumerate([*kill_after, None]):
            if attempt and data.draw(st.booleans()):
                eta, groups_per_step = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 3))
                smaller |= groups_per_step < schedule.groups_per_step
                schedule = replace(
                    schedule,
                    max_staleness=eta,
                    groups_per_step=groups_per_step,
                    push_every=data.draw(st.integers(1, eta + 1)),
                    speeds=data.draw(st.lists(st.integers(0, 12), min_size=1, max_size=3)),
                )
            run = Run(schedule, Path(folder), attempt, turns, run)
            try:
                asyncio.run(run.main())
                break
            except* Killed:
                event("killed before the first checkpoint" if run.saved is None else "killed")
        report, summary = audit(Path(folder) / "receipts.jsonl")
    assert not report.broken, (summary, report.broken)
    assert report.checked["books"] > NUM_STEPS and "; residual 0/0\n" in summary
    assert_trained_once(run)
    if not smaller:  # else the last steps may need fewer groups than are alive
        assert_complete(run)


@settings(max_examples=many(20))
@given(schedules(), st.lists(st.integers(0, 12), min_size=1, max_size=3), st.booleans())
def test_a_synchronous_curriculum_draws_the_same_whoever_is_faster(schedule, speeds, filters):
    rates = dict.fromkeys(schedule.rates, 0) | {"straggles": 0.1}
    push = {"max_staleness": 0, "push_every": 1}
    schedule = replace(schedule, curriculum=True, rates=rates, **push)
    batches = []
    for each in (schedule, replace(schedule, speeds=speeds, rollouts_in_flight=1)):
        with tempfile.TemporaryDirectory() as folder:
            run = Run(each, Path(folder))
            run.filters = filters
            asyncio.run(run.main())
            report, _ = audit(Path(folder) / "receipts.jsonl")
        assert not report.broken
        size = schedule.groups_per_step
        batches.append([set(run.trained[i : i + size]) for i in range(0, len(run.trained), size)])
    assert batches[0] == batches[1] and len(batches[0]) == NUM_STEPS


async def test_a_resume_with_a_smaller_batch_admits_no_more_than_the_contract_lets_in():
    prompts = PromptStream([{"prompt_index": i} for i in range(99)], shuffle=False, seed=0)
    before = Ledger(StalenessContract(2, 8), 9, prompts)
    entries = [await before.admit("test", 1) for _ in range(24)]
    for entry in entries[:20]:
        entry.start_version = 0
        await before.finish_generation(entry.group_id, [1])
        await before.enter_buffer(entry.group_id)
    after = Ledger(StalenessContract(1, 2), 9, prompts)
    after.load_state_dict(before.state_dict())
    # Two batches may live: they are restored; the others start again, in their order, later.
    assert [e.group_id for e in after.in_state("buffered")] == [0, 1, 2, 3]
    assert [e.group_id for e in after.living()] == list(range(24))
    assert [e.group_id for e in after.living() if e.tokens is None] == list(range(4, 24))
    for step in (1, 2):
        await after.take([2 * step - 2, 2 * step - 1])
        await after.publish(step)
        after.finish_step(step)
        admitted = [(await after.admit("test", 1)) for _ in range(2)]
        assert [e.group_id for e in admitted] == [2 * step + 2, 2 * step + 3]
        assert [e.prompt for e in admitted] == [{"prompt_index": e.group_id} for e in admitted]
    assert after.issued == before.issued, "all of them are old groups"
