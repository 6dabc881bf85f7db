"""Receipts have each event of the ledger, between the start and the end of each attempt."""

import asyncio
import json
from itertools import count
from pathlib import Path

import pytest

from grpo_components.exchange.event_order import EventOrder
from grpo_components.exchange.ledger import Ledger
from grpo_components.exchange.staleness import StalenessContract
from grpo_components.records.receipts import Receipts

SETTINGS = {"max_staleness": 1, "groups_per_step": 2, "group_size": 2}


def new_ledger(attempt=0):
    ledger = Ledger(StalenessContract(1, 2), 3, (({"prompt_index": n}, 2) for n in count(10)))
    ledger.events = EventOrder(attempt)
    return ledger


def make(tmp_path):
    ledger = new_ledger()
    return ledger, Receipts(tmp_path / "receipts.jsonl", ledger, SETTINGS)


def read(tmp_path):
    text = (tmp_path / "receipts.jsonl").read_text()
    assert text.endswith("\n")
    events = [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]
    assert all(len(event.pop("chain")) == 64 and event.pop("time") > 0 for event in events)
    return events


async def train(ledger, policy_version):
    for response_tokens in ((3, 4), (5, 6)):
        entry = await ledger.admit("test", 1)
        await ledger.finish_generation(entry.group_id, response_tokens)
        await ledger.enter_buffer(entry.group_id)
    await ledger.take([entry.group_id for entry in ledger.in_state("buffered")])
    await ledger.publish(policy_version)
    ledger.finish_step(policy_version, {"batch_hash": "hash"})


def test_they_have_each_event_of_a_step_and_what_it_trained(tmp_path):
    ledger, receipts = make(tmp_path)
    asyncio.run(train(ledger, 1))
    ledger.events.note("load", role="generator_1", version=1, checksum="abc", published="abc")
    receipts.close()
    start, *events = read(tmp_path)
    counts = {"format": 4, "steps_done": 0, "policy_version": 0, "num_steps": 3, "carried": {}}
    assert start == {"event": "start", "attempt": 0, **counts, **SETTINGS}
    names = "issue finish buffer issue finish buffer sample publish step load end"
    assert [event["event"] for event in events] == names.split()
    assert events[1]["response_tokens"] == [3, 4] and events[6]["groups"] == [0, 1]
    versions = {"trained_from": 0, "policy_version": 1}
    step = {"event": "step", "attempt": 0, "step": 1, **versions, "batch_hash": "hash"}
    assert events[8] == step


def test_the_end_of_a_failed_run_says_what_is_left_and_claims_nothing(tmp_path):
    ledger, receipts = make(tmp_path)

    async def run():
        await train(ledger, 1)
        handed_back = await ledger.admit("test", 1)
        buffered, _ = await ledger.admit("test", 1), await ledger.admit("test", 1)
        await ledger.finish_generation(buffered.group_id, [1, 2])
        await ledger.enter_buffer(buffered.group_id)
        await ledger.drop([handed_back.group_id], "failed", reissue=True)

    asyncio.run(run())
    receipts.close()
    written = read(tmp_path)
    receipts.close()
    ledger.events.note("abort", role="generator_0", responses=1)
    assert read(tmp_path) == written, "nothing comes after the end"
    assert written[-1] == {
        **{"event": "end", "attempt": 0, "finished": False, "step": 1, "policy_version": 1},
        "living": [
            {"group": 3, "prompt": 13, "epoch": 2, "state": "buffered", "tokens": 3},
            {"group": 4, "prompt": 14, "epoch": 2, "state": "in_flight", "tokens": None},
        ],
        "waiting": [{"prompt": 12, "epoch": 2}],
    }
    assert written[-2]["tokens"] == [None], "it was dropped before it was generated"


def test_a_resumed_attempt_says_which_groups_it_carries(tmp_path):
    before, receipts = make(tmp_path)

    async def fill():
        for _ in range(3):
            await before.admit("test", 1)
        for group_id in (0, 2):
            await before.finish_generation(group_id, [7, 9])
        await before.enter_buffer(2)

    asyncio.run(fill())
    receipts.close()
    ledger = new_ledger(attempt=1)
    ledger.load_state_dict(before.state_dict())
    Receipts(tmp_path / "receipts.jsonl", ledger, SETTINGS)
    assert read(tmp_path)[-1]["carried"] == {"2": 16}
    asyncio.run(ledger.admit("test", 1))
    again = read(tmp_path)[-1]
    assert (again["event"], again["group"], again["attempt"]) == ("issue", 0, 1)


def test_on_a_full_disk_a_record_is_an_error_and_the_end_hides_no_other(tmp_path):
    failing, receipts = make(tmp_path)
    (tmp_path / "other").mkdir()
    _, closed = make(tmp_path / "other")
    for each in (receipts, closed):
        each._file._end_file = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115
    with pytest.raises(OSError, match=r"cannot be written: No space.*/dev/full"):
        failing.events.note("publish", version=1)
    receipts.close()
    closed.close()  # the run has failed by something else: that is told, not this
