"""The handles call the roles by their methods, and record in the ledger what comes of it."""

import asyncio
import contextlib
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from lib.role import limits, stand_in_role, waits_of
from lib.trajectories import response

from grpo_components.cluster.batch import Batch
from grpo_components.cluster.handles import (
    GeneratorHandle,
    ReferencesHandle,
    ReplayBufferHandle,
    RewardModelHandle,
    TrainersHandle,
)
from grpo_components.cluster.weight_transfer import GRACE_S
from grpo_components.errors import RoleFailedError, RoleLostError
from grpo_components.exchange.event_order import EventOrder
from grpo_components.exchange.group_reuse import GroupReuse
from grpo_components.exchange.ledger import Ledger
from grpo_components.exchange.replay_buffer import ReplayBuffer
from grpo_components.exchange.staleness import StalenessContract
from grpo_components.trajectory import pack, summarize
from grpo_tools.replay.recorded_run import RecordedOrder

pytestmark = pytest.mark.anyio

G = 2


class Sampler:
    """A generator."""

    def __init__(self, version=0):
        self.version, self.asked, self.room = version, [], []
        self.scores = [(math.nan, False)] * G

    def reserve(self, patience_s):
        return self.room.pop(0)

    def begin_attempt(self):
        pass

    def generate_group(self, prompt, epoch, group_id, attempt, temperature):
        self.asked.append((prompt["prompt_index"], epoch, group_id, attempt, temperature))
        identity = {"prompt_index": prompt["prompt_index"], "epoch": epoch}
        group = [
            response(group_id, [self.version] * 3, **identity, reward=reward, success=success)
            for reward, success in self.scores
        ]
        return pack(group), summarize(pack(group)), {"text of": group_id}

    def evaluate(self, prompts, temperature, samples, logged):
        return [{"prompt": prompt} for prompt in prompts]


class Setting:
    """The real ledger and buffer behind their handles, and one generator."""

    def __init__(self, wait_for_stale=False, eta=1, groups_per_step=1, **options):
        contract = StalenessContract(eta, groups_per_step)
        prompts = (({"prompt_index": 10 + i}, 0) for i in range(10**6))
        self.ledger, self.events = Ledger(contract, 50, prompts), []
        self.ledger.events = EventOrder(attempt=3, listeners=[self.events.append])
        self.sampler = Sampler()
        role = stand_in_role("generator_0", self.sampler)
        self.generator = GeneratorHandle(role, self.ledger, limits(rollout_s=7), **options)
        self.pause = partial(asyncio.sleep, 0)  # before a restart of the buffer
        self.buffer_role = stand_in_role(
            *("replay_buffer", lambda: ReplayBuffer(contract=contract, timeout_s=0.01)),
            recover=lambda name: self.buffer.refill(),
            pause=lambda seconds: self.pause(),
        )
        self.buffer = ReplayBufferHandle(
            self.buffer_role, self.ledger, limits(batch_s=5), wait_for_stale=wait_for_stale
        )

    async def generated(self):
        entry = await self.ledger.admit("generator_0", 1)
        self.summary = await self.generator.generate_group(entry, 0.5)
        return entry

    def names(self):
        return [event["event"] for event in self.events]


async def test_a_group_is_asked_for_by_its_identity_and_its_end_is_recorded_like_an_evaluations():
    setting = Setting()
    waits = waits_of(setting.generator.role)
    entry = await setting.generated()
    assert setting.sampler.asked == [(10, 0, 0, 3, 0.5)]
    assert waits == [("generate_group", 7.0)]
    assert setting.summary.response_tokens == [3, 3] and entry.tokens == 6
    assert await entry.text == {"text of": 0}
    results = await setting.generator.evaluate([4, 5], 0.0, 1, step=20, timeout_s=60.0)
    assert results == [{"prompt": 4}, {"prompt": 5}]
    assert setting.names() == ["issue", "finish", "evaluate"]
    event = {"event": "evaluate", "attempt": 3, "role": "generator_0", "step": 20}
    assert setting.events[-1] == event


@pytest.mark.parametrize(
    ("scores", "result"),
    [([1.0, 0.5], (1, 2)), ([1.0, math.nan], (1, 1)), ([math.nan] * G, (0, 0))],
)
async def test_with_a_curriculum_the_successes_of_what_was_scored_are_recorded(scores, result):
    setting = Setting(counts_successes=True)
    setting.sampler.scores = [(score, score == 1.0) for score in scores]
    await setting.generated()
    assert setting.events[-1] == {
        **{"event": "finish", "attempt": 3, "group": 0, "response_tokens": [3, 3], "prompt": 10},
        **{"successes": result[0], "scored": result[1]},
    }


async def test_room_is_reserved_for_as_many_groups_as_have_it():
    setting = Setting()
    generator, room = setting.generator, setting.sampler.room
    room += [2, 1, 3]
    assert [await generator.has_room() for _ in range(3)] == [True] * 3
    assert room == [3]
    assert await generator.has_room() and room == []
    await generator.begin_attempt()
    room.append(1)
    assert await generator.has_room() and room == [], "what was reserved is forgotten"


async def test_who_keeps_the_room_for_too_long_is_named_unless_an_evaluation_holds_the_weights():
    """A lost generator has none, and a replay needs none."""
    setting = Setting()
    setting.sampler.room += [0, 0, 1]
    with pytest.raises(TimeoutError, match=r"generator_0 still samples .* 46 s"):
        await setting.generator.has_room()
    with setting.ledger.pin_weights():
        assert await setting.generator.has_room()
    setting.generator.role.lost = True
    assert not await setting.generator.has_room()
    setting.ledger.events = EventOrder(recording=RecordedOrder([], 5))
    assert await setting.generator.has_room()


async def test_a_batch_is_taken_as_it_was_put_and_stale_groups_are_dropped_on_the_way():
    setting = Setting(eta=2)
    waits = waits_of(setting.buffer_role)
    for version in (0, 0, 3):
        setting.sampler.version = version
        await setting.buffer.add(await setting.generated())
    assert waits[-1] == ("add", 5.0 + GRACE_S)
    setting.ledger.policy_version = 3
    batch = await setting.buffer.take(1)
    assert [entry.group_id for entry in batch.entries] == [2]
    assert (batch.dropped_stale, batch.buffered) == (2, 0)
    assert setting.ledger.dropped_groups == {"stale": 2}
    assert [prompt["prompt_index"] for prompt, _ in setting.ledger.waiting_prompts] == [10, 11]
    assert setting.names()[-3:] == ["buffer", "drop", "sample"]


async def test_with_wait_a_step_lets_groups_finish_that_it_would_make_stale():
    setting = Setting(wait_for_stale=True, eta=0)
    entry = await setting.ledger.admit("generator_0", 1)
    taking = asyncio.create_task(setting.buffer.take(1))
    await asyncio.sleep(0)
    assert "take" not in setting.buffer_role.process.host.received
    await setting.generator.generate_group(entry, 1.0)
    await setting.buffer.add(entry)
    assert [e.group_id for e in (await taking).entries] == [entry.group_id]


@pytest.mark.parametrize("taken", [False, True])
async def test_a_restarted_buffer_gets_a_group_again_unless_a_step_has_taken_it(taken):
    setting = Setting()
    role, entry = setting.buffer_role, await setting.generated()

    async def pause():
        if taken:  # the step's answer came before that of `add`, which the restart cancelled
            await setting.ledger.take([entry.group_id])
            setting.ledger.finish_step(1)

    role.process.host.dies_in, setting.pause = {"add"}, pause
    await setting.buffer.add(entry)
    assert (entry.state == "buffered") != taken
    with pytest.raises(RoleFailedError) if taken else contextlib.nullcontext():
        _, found = await role.call("take", 1, 0, timeout_s=1)
        assert [summary.group_id for summary in found.groups] == [0]


async def test_what_may_be_reused_survives_a_restart_of_the_buffer_and_a_checkpoint(tmp_path):
    """The buffer is restarted while a step trains a group that the next step trains again."""

    def setting_with_reuse():
        setting = Setting(eta=3, groups_per_step=2)
        setting.ledger.reuse = GroupReuse(StalenessContract(3, 2), 0.5, 3)
        setting.sampler.scores = [(1.0, True), (0.0, False)]
        return setting

    setting = setting_with_reuse()
    ledger, buffer = setting.ledger, setting.buffer
    for _ in range(4):
        await buffer.add(await setting.generated())
    assert [e.group_id for e in (await buffer.take(2)).entries] == [0, 1]
    await setting.buffer_role.replay_restart("died")
    ledger.finish_step(1)
    parts = [part for entry in ledger.stored() for part in entry.parts]
    assert await buffer.write_state(tmp_path, [None, *parts]) is None
    after = setting_with_reuse()
    after.ledger.load_state_dict(ledger.state_dict())
    await after.buffer.read_state(tmp_path)
    for each in (setting, after):
        batch = await each.buffer.take(2)
        assert [e.group_id for e in batch.entries] == [2, 0] and batch.reused == 1
        assert [g.group_id for g in batch.groups] == [2, 0]
        assert each.ledger.in_state("in_training") == batch.entries[:1]


async def test_a_text_that_was_lost_with_a_node_is_left_out_and_another_failure_is_not():
    setting = Setting()
    entry = await setting.generated()

    async def failing(kind):
        raise RoleFailedError("replay_buffer", "cannot go on", "its.log", kind)

    entry.text = failing("lost")
    assert await setting.buffer.texts([entry]) == [None]
    entry.text = failing("silent")
    with pytest.raises(RoleFailedError):
        await setting.buffer.texts([entry])


async def test_a_group_whose_data_was_lost_with_a_node_is_given_back_and_generated_again():
    class Other:
        kind = "lost"

        async def call(self, method, *args, **limits):
            raise RoleFailedError("reference_0", "cannot go on", "its.log", self.kind)

        call_once = call

    setting, other = Setting(), Other()
    entry = await setting.generated()
    buffer = ReplayBufferHandle(other, setting.ledger, limits(), wait_for_stale=False)
    calls = (
        ReferencesHandle([other], limits()).add_logprobs,
        RewardModelHandle(other, limits()).add_scores,
    )
    for call in (*calls, buffer.add):
        for other.kind, error in (("lost", RoleLostError), ("died", RoleFailedError)):
            with pytest.raises(error, match="reference_0 cannot go on"):
                await call(entry)
    setting.ledger.give_back(entry)
    assert entry.parts == ()
    again = await setting.generated()
    assert again is entry and len(entry.parts) == 2
    await setting.buffer.add(again)


async def test_checkpointed_groups_come_back_with_their_parts_and_without_their_text(tmp_path):
    before, after = Setting(), Setting()
    entry = await before.generated()
    await before.buffer.add(entry)
    assert await before.buffer.texts([entry]) == [{"text of": 0}]
    assert await before.buffer.write_state(tmp_path, [entry.parts[0], *entry.parts]) is None
    after.ledger.load_state_dict(before.ledger.state_dict())
    await after.buffer.read_state(tmp_path)
    (entry,) = after.ledger.in_state("buffered")
    assert await after.buffer.texts([entry]) == [None]
    batch = await after.buffer.take(1)
    assert batch.entries == [entry] and len(entry.parts) == 2


def group_of(group_id):
    entry = SimpleNamespace(group_id=group_id, text="text", reference_kl=None)
    entry.parts = f"packed {group_id}", "summary"
    return entry


async def test_references_share_the_groups_and_the_kl_goes_to_the_ledger():
    class Reference:
        def __init__(self, number):
            self.number = number

        def add_logprobs(self, packed):
            return f"{packed} with logprobs of {self.number}", [self.number] * G

    roles = [stand_in_role(f"reference_{i}", Reference(i)) for i in range(2)]
    references = ReferencesHandle(roles, limits())
    groups = [group_of(i) for i in range(3)]
    for group in groups:
        await references.add_logprobs(group)
    named = [f"packed {i} with logprobs of {i % 2}" for i in range(3)]
    assert [await group.parts[0] for group in groups] == named
    assert [group.reference_kl for group in groups] == [[0, 0], [1, 1], [0, 0]]
    teachers = ReferencesHandle(roles, limits(), keep_kl=False)
    await teachers.add_logprobs(groups[0])
    assert await groups[0].parts[0] == "packed 0 with logprobs of 0 with logprobs of 0"
    await teachers.add_logprobs(graded := group_of(1))
    assert graded.reference_kl is None and graded.parts[1] == "summary"


async def test_the_reward_model_changes_a_group_its_summary_and_its_text():
    class RewardModel:
        def add_scores(self, packed, text):
            return f"{packed}, scored", "new summary", f"{text}, scored"

    handle = RewardModelHandle(stand_in_role("reward_model", RewardModel()), limits())
    entry = group_of(0)
    assert await handle.add_scores(entry) == "new summary"
    packed, summary = entry.parts
    assert (await packed, await summary) == ("packed 0, scored", "new summary")
    assert await entry.text == "text, scored"


async def test_every_rank_gets_each_call_with_the_same_arguments():
    class Rank:
        def __init__(self, rank):
            self.rank, self.calls = rank, []

        def train_step(self, packed, advantages, steps_done):
            self.calls.append((packed, advantages.tolist(), steps_done))
            return "result" if self.rank == 0 else None

        def hold_state(self, in_background):
            self.calls.append(in_background)

        def write_state(self, folder):
            return None if self.rank == 0 else f"no room in {folder}"

        def load_state(self, checkpoint):
            self.calls.append(checkpoint)

    ledger = SimpleNamespace(steps_done=7)
    ranks = [Rank(rank) for rank in range(2)]
    roles = [stand_in_role(f"trainer_{rank.rank}", rank) for rank in ranks]
    trainers = TrainersHandle(roles, ledger, limits(weights_s=5))
    batch = Batch("packed", [], [], "", 0, 0, 0.0)
    assert await trainers.train_step(batch, np.array([[1.0, -1.0]])) == "result"
    await trainers.hold_state(in_background=True)
    assert await trainers.write_state(Path("/step_8")) == [None, "no room in /step_8"]
    await trainers.load_state(Path("/step_8"))
    for rank in ranks:
        assert rank.calls == [("packed", [1.0, -1.0], 7), True, "/step_8"]


@pytest.mark.parametrize(("kls", "expected"), [([[0.1, 0.2]], [[0.1, 0.2]]), ([None], None)])
def test_a_batch_is_arrays_of_groups_by_responses(kls, expected):
    lengths = {"response_lengths": [3, 4], "finish_reasons": ["stop", "length"]}
    summary = SimpleNamespace(rewards=[1.0, math.nan], **lengths)
    entries = [SimpleNamespace(reference_kl=kl) for kl in kls]
    batch = Batch("packed", [summary], entries, "", 0, 0, 0.0)
    np.testing.assert_array_equal(batch.rewards, [[1.0, np.nan]])
    assert batch.response_lengths.tolist() == [[3, 4]]
    assert batch.cut_off.tolist() == [[False, True]]
    kl = batch.reference_kl
    assert (kl if kl is None else kl.tolist()) == expected
