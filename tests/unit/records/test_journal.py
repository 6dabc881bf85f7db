"""A step is in ledger, receipt and checkpoint, or in none of them."""

import asyncio
import json
from types import SimpleNamespace
from unittest.mock import AsyncMock, MagicMock

import pytest

from grpo_components.errors import ReplayError
from grpo_components.exchange.ledger import Ledger
from grpo_components.exchange.staleness import StalenessContract
from grpo_components.records.journal import Journal
from grpo_components.records.receipts import Receipts
from grpo_components.records.resume import RunStart
from grpo_components.replay.event_order import EventOrder
from grpo_components.replay.recorded_run import Original
from grpo_components.training.step_result import StepResult

RESULT = StepResult(1, {0: 9}, {}, 9, "", {"off_policy/correction_mass": 1.0})


class Prompts:
    """Endless prompts that count how many were drawn."""

    def __init__(self):
        self.drawn = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.drawn += 1
        return {"prompt_index": self.drawn - 1}, 0

    def state_dict(self):
        return {"drawn": self.drawn}

    def load_state_dict(self, state):
        self.drawn = state["drawn"]


class Setting:
    """The real ledger and receipts, and checkpoints that keep what they are told to hold."""

    def __init__(self, folder, recorded=None, original=None, attempt=0):
        self.prompts = Prompts()
        self.ledger = Ledger(StalenessContract(1, 1), 4, self.prompts)
        self.ledger.events = EventOrder(attempt, recorded, timeout_s=9.0)
        self.events = []
        self.ledger.events.listen(self.events.append)
        self.receipts_file = folder / "receipts.jsonl"
        settings = {"max_staleness": 1, "groups_per_step": 1, "group_size": 2}
        receipts = Receipts(self.receipts_file, self.ledger, attempt, settings)
        self.checkpoints = MagicMock(save=AsyncMock(), wait_idle=AsyncMock())
        self.held = []
        self.checkpoints.hold = lambda: self.held.append(self.state())
        start = RunStart(attempt, None, "", folder, self.state(), MagicMock(), MagicMock())
        self.journal = Journal(
            start,
            self.ledger,
            self.prompts,
            receipts,
            self.checkpoints,
            original=original,
            save_every_n_steps=2,
        )

    def state(self):
        return {"ledger": self.ledger.state_dict(), "prompts": self.prompts.state_dict()}

    def records(self):
        return [json.loads(line) for line in self.receipts_file.read_text().splitlines()]

    async def buffered(self):
        entry = await self.ledger.admit("generator_0", 1)
        await self.ledger.finish_generation(entry.group_id, [4, 5])
        await self.ledger.enter_buffer(entry.group_id)
        return entry

    async def sampled(self):
        """A group that the next step trains, and one in flight."""
        entry = await self.buffered()
        await self.ledger.take([entry.group_id])
        return await self.ledger.admit("generator_0", 1)


def test_what_is_held_for_the_checkpoint_is_what_the_receipt_says(tmp_path):
    """Tasks that are ready to change the ledger get no turn in between."""

    async def run():
        setting = Setting(tmp_path)
        flying = await setting.sampled()
        other = asyncio.create_task(setting.ledger.finish_generation(flying.group_id, [1, 1]))
        step = await setting.journal.commit("hash", RESULT)
        await other
        assert step == setting.ledger.steps_done == 1
        (held,) = setting.held
        *_, record, late = setting.records()
        assert (record["step"], record["policy_version"], record["batch_hash"]) == (1, 1, "hash")
        assert record["token_versions"] == {"0": 9} and record["correction_mass"] == 1.0
        assert (late["event"], late["group"]) == ("finish", flying.group_id)
        (living,) = held["ledger"]["living"]
        assert (living["group_id"], living["tokens"]) == (flying.group_id, None)
        assert held["ledger"]["steps_done"] == 1 and held["prompts"] == {"drawn": 2}

    asyncio.run(run())


def test_a_replayed_step_waits_for_its_turn(tmp_path):
    async def run():
        first = Setting(tmp_path)
        flying = await first.sampled()
        await first.ledger.drop([flying.group_id], "failed")
        await first.journal.commit("hash", RESULT)
        recorded = [event | {"number": i} for i, event in enumerate(first.events)]
        second = Setting(tmp_path, recorded)
        flying = await second.sampled()
        committing = asyncio.create_task(second.journal.commit("hash", RESULT))
        await asyncio.sleep(0)
        assert second.ledger.steps_done == 0 and not second.held
        await second.ledger.drop([flying.group_id], "failed")
        assert await committing == 1

    asyncio.run(run())


def test_a_replay_that_trained_another_batch_commits_nothing_of_it(tmp_path):
    async def run():
        setting = Setting(tmp_path, original=Original({1: "hash"}, {}))
        await setting.sampled()
        with pytest.raises(ReplayError) as error:
            await setting.journal.commit("another", RESULT)
        assert "step 1" in str(error.value) and "another" in str(error.value)
        assert setting.ledger.steps_done == 0 and not setting.held
        assert "step" not in [record["event"] for record in setting.records()]

    asyncio.run(run())


def test_a_replays_weights_are_compared_with_the_originals():
    original = Original({}, {2: "abc"})
    for version, checksum in ((2, "abc"), (3, "def")):  # of version 3 the original says nothing
        original.check_load({"event": "load", "version": version, "checksum": checksum})
    original.check_load({"event": "publish", "version": 2})
    with pytest.raises(ReplayError) as error:
        original.check_load({"event": "load", "version": 2, "checksum": "def"})
    for part in ("step 3", "version 2", "abc", "def"):
        assert part in str(error.value)


def test_checkpoints_are_written_every_n_steps_and_after_the_last(tmp_path):
    async def run():
        setting = Setting(tmp_path)
        roles, saved = MagicMock(), []
        setting.checkpoints.save = AsyncMock(side_effect=lambda step, *_: saved.append(step))
        for number in range(4):
            entry = await setting.buffered()
            await setting.ledger.take([entry.group_id])
            step = await setting.journal.commit(f"hash {number}", RESULT)
            await setting.journal.save_if_due(step, roles, None)
        assert saved == [2, 4]
        setting.ledger.num_steps = 5
        setting.ledger.steps_done = 5
        await setting.journal.save_if_due(5, roles, None)
        assert saved == [2, 4, 5]

    asyncio.run(run())


def test_a_rollback_ends_the_attempt_and_begins_the_next_where_the_run_began(tmp_path):
    async def run():
        setting = Setting(tmp_path)
        await setting.sampled()
        await setting.journal.commit("hash", RESULT)
        assert await setting.journal.roll_back() == 1
        assert setting.ledger.attempt == setting.ledger.events.attempt == 1
        assert (setting.ledger.steps_done, setting.ledger.issued, setting.prompts.drawn) == (
            0,
            0,
            0,
        )
        await setting.buffered()
        setting.journal.close()
        records = setting.records()
        kinds = [
            (record["event"], record["attempt"])
            for record in records
            if record["event"] in ("start", "step", "end")
        ]
        assert kinds == [("start", 0), ("step", 0), ("end", 0), ("start", 1), ("end", 1)]
        (issued,) = [e for e in records if (e["event"], e["attempt"]) == ("issue", 1)]
        assert (issued["group"], issued["prompt"]) == (0, 0)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("attempt", "checkpoint", "loaded", "published"),
    [(0, None, False, False), (1, None, False, True), (1, "step_4", True, True)],
)
def test_roles_are_restored_from_the_checkpoint_and_generators_from_the_trainers(
    tmp_path, attempt, checkpoint, loaded, published
):
    async def run():
        start = RunStart(
            attempt,
            checkpoint and tmp_path / checkpoint,
            "",
            tmp_path,
            {},
            MagicMock(),
            MagicMock(),
        )
        checkpoints, weights = MagicMock(restore=AsyncMock()), MagicMock(restore=AsyncMock())
        parts = (MagicMock(), MagicMock(), MagicMock())
        journal = Journal(start, *parts, checkpoints, original=None, save_every_n_steps=1)
        await journal.restore(SimpleNamespace(trainers="trainers", buffer="buffer"), weights)
        assert checkpoints.restore.await_count == loaded
        assert weights.restore.await_count == published

    asyncio.run(run())
