"""A step is in ledger, receipt and checkpoint, or in none of them."""

import asyncio
from unittest.mock import AsyncMock, MagicMock

import pytest
from lib.receipts import of
from lib.rows import read_rows

from grpo_components.data.prompt_stream import PromptStream
from grpo_components.errors import ReplayError, ReplayStop
from grpo_components.exchange.event_order import EventOrder
from grpo_components.exchange.ledger import Ledger
from grpo_components.exchange.staleness import StalenessContract
from grpo_components.records.journal import Journal
from grpo_components.records.receipts import Receipts
from grpo_components.records.resume import RunStart
from grpo_components.settings import Settings
from grpo_components.training.step_result import StepResult
from grpo_tools.replay.recorded_run import RecordedOrder

pytestmark = pytest.mark.anyio
RESULT = StepResult(1, {0: 9}, {}, 9, "", {"off_policy/correction_mass": 1.0})


def start_in(folder, attempt=0, checkpoint=None, state=None):
    return RunStart(attempt, checkpoint, "", folder, state or {}, MagicMock(), MagicMock())


def settings_in(folder, **changes):
    return Settings.model_construct(output_dir=str(folder), **changes)


class Setting:
    """The real ledger and receipts; no checkpoint is written."""

    def __init__(self, folder, recorded=None, until=None):
        rows = [{"prompt_index": index} for index in range(9)]
        self.prompts = PromptStream(rows, shuffle=False, seed=1)
        self.ledger = Ledger(StalenessContract(1, 1), 4, self.prompts)
        self.ledger.events = EventOrder(0, recorded and RecordedOrder(recorded, 9.0))
        self.events, self.saved = [], []
        self.ledger.events.listen(
            lambda event: self.events.append(event | {"number": len(self.events)})
        )
        self.receipts_file = folder / "receipts.jsonl"
        settings = {"max_staleness": 1, "groups_per_step": 1, "group_size": 2}
        receipts = Receipts(self.receipts_file, self.ledger, settings)
        cfg = settings_in(folder, save_every_n_steps=2, replay_until=until)
        state = {"ledger": self.ledger.state_dict(), "prompts": self.prompts.state_dict()}
        start = start_in(folder, state=state)
        self.journal = Journal(cfg, start, self.ledger, self.prompts, receipts, MagicMock())
        self.journal.save = AsyncMock(side_effect=lambda step, *_: self.saved.append(step))

    def records(self):
        return read_rows(self.receipts_file)

    async def buffered(self):
        entry = await self.ledger.admit("generator_0", 1)
        await self.ledger.finish_generation(entry.group_id, [4, 5])
        await self.ledger.enter_buffer(entry.group_id)
        return entry

    async def sampled(self):
        """A group that the next step trains, and one in flight."""
        await self.ledger.take([(await self.buffered()).group_id])
        return await self.ledger.admit("generator_0", 1)


async def test_what_is_held_for_the_checkpoint_is_what_the_receipt_says(tmp_path):
    """Tasks that are ready to change the ledger get no turn in between."""
    setting = Setting(tmp_path)
    flying = await setting.sampled()
    other = asyncio.create_task(setting.ledger.finish_generation(flying.group_id, [1, 1]))
    step = await setting.journal.commit("hash", RESULT)
    await other
    assert step == setting.ledger.steps_done == 1
    held, _ = setting.journal.held
    *_, record, late = setting.records()
    assert (record["step"], record["policy_version"], record["batch_hash"]) == (1, 1, "hash")
    assert record["token_versions"] == {"0": 9} and record["correction_mass"] == 1.0
    assert (late["event"], late["group"]) == ("finish", flying.group_id)
    (living,) = held["ledger"]["living"]
    assert (living["group_id"], living["tokens"]) == (flying.group_id, None)
    assert held["ledger"]["steps_done"] == 1 and held["prompts"]["drawn"] == [2]


async def test_a_replayed_step_waits_for_its_turn(tmp_path):
    first = Setting(tmp_path)
    flying = await first.sampled()
    await first.ledger.drop([flying.group_id], "failed")
    await first.journal.commit("hash", RESULT)
    second = Setting(tmp_path, first.events)
    flying = await second.sampled()
    committing = asyncio.create_task(second.journal.commit("hash", RESULT))
    await asyncio.sleep(0)
    assert second.ledger.steps_done == 0 and not second.journal.held[0]
    await second.ledger.drop([flying.group_id], "failed")
    assert await committing == 1


async def test_a_replay_that_trained_another_batch_commits_nothing_of_it(tmp_path):
    first = Setting(tmp_path)
    await first.sampled()
    await first.journal.commit("hash", RESULT)
    (again := tmp_path / "replay").mkdir()
    setting = Setting(again, first.events)
    await setting.sampled()
    with pytest.raises(ReplayError, match=r"step 1.*another"):
        await setting.journal.commit("another", RESULT)
    assert setting.ledger.steps_done == 0 and not setting.journal.held[0]
    assert not of(setting.records(), "step")


async def test_a_replay_of_some_steps_ends_with_a_checkpoint_of_the_last(tmp_path):
    setting = Setting(tmp_path, until=1)
    await setting.sampled()
    step = await setting.journal.commit("hash", RESULT)
    with pytest.raises(ReplayStop):
        await setting.journal.save_if_due(step, MagicMock(), None)
    assert setting.saved == [1]


async def test_checkpoints_are_written_every_n_steps_and_after_the_last(tmp_path):
    setting = Setting(tmp_path)
    for number in range(4):
        await setting.ledger.take([(await setting.buffered()).group_id])
        step = await setting.journal.commit(f"hash {number}", RESULT)
        await setting.journal.save_if_due(step, MagicMock(), None)
    assert setting.saved == [2, 4]
    setting.ledger.num_steps = setting.ledger.steps_done = 5
    await setting.journal.save_if_due(5, MagicMock(), None)
    assert setting.saved == [2, 4, 5]


async def test_a_rollback_ends_the_attempt_and_begins_the_next_where_the_run_began(tmp_path):
    setting = Setting(tmp_path)
    await setting.sampled()
    await setting.journal.commit("hash", RESULT)
    await setting.journal.roll_back()
    ledger = setting.ledger
    assert ledger.attempt == ledger.events.attempt == 1
    assert (ledger.steps_done, ledger.issued) == (0, 0)
    assert setting.prompts.state_dict()["drawn"] == [0]
    await setting.buffered()
    setting.journal.close()
    records = setting.records()
    kinds = [(e["event"], e["attempt"]) for e in records if e["event"] in ("start", "step", "end")]
    assert kinds == [("start", 0), ("step", 0), ("end", 0), ("start", 1), ("end", 1)]
    (issue,) = of(records, "issue", attempt=1)
    assert (issue["group"], issue["prompt"]) == (0, 0)


@pytest.mark.parametrize(
    ("attempt", "checkpoint", "loaded", "published"),
    [(0, None, False, False), (1, None, False, True), (1, "step_4", True, True)],
)
async def test_roles_are_restored_from_the_checkpoint_and_generators_from_the_trainers(
    tmp_path, attempt, checkpoint, loaded, published
):
    start = start_in(tmp_path, attempt, checkpoint and tmp_path / checkpoint)
    roles, weights = AsyncMock(), AsyncMock()
    journal = Journal(settings_in(tmp_path), start, *(MagicMock(),) * 4)
    await journal.restore(roles, weights)
    assert roles.trainers.load_state.await_count == roles.buffer.read_state.await_count == loaded
    assert weights.restore.await_count == published
