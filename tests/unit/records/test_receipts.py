"""Receipts say what each step was made of, from the ledger's events, however the run ends."""

import asyncio
import json
import math

import pytest

from grpo_components.exchange.ledger import Ledger
from grpo_components.exchange.staleness import StalenessContract
from grpo_components.records.receipts import Receipts

SETTINGS = {"max_staleness": 1, "groups_per_step": 2, "group_size": 2}


def new_ledger(num_steps=3):
    prompts = (({"prompt_index": 10 + i}, 2) for i in range(10**6))
    return Ledger(StalenessContract(1, 2), num_steps, prompts)


def make(tmp_path, num_steps=3, generators=("generator_0", "generator_1"), attempt=0):
    ledger, path = new_ledger(num_steps), tmp_path / "receipts.jsonl"
    return ledger, Receipts(path, ledger, attempt, **SETTINGS, generators=generators)


def read(tmp_path):
    text = (tmp_path / "receipts.jsonl").read_text()
    assert text.endswith("\n")
    records = [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]
    assert all(len(record.pop("chain")) == 64 for record in records)
    return records


async def train(ledger, policy_version, lengths=((3, 4), (5, 6))):
    for response_tokens in lengths:
        entry = await ledger.admit("test", 1)
        await ledger.finish_generation(entry.group_id, response_tokens)
        await ledger.enter_buffer(entry.group_id)
    await ledger.take([entry.group_id for entry in ledger.in_state("buffered")])
    await ledger.publish(policy_version)
    ledger.finish_step(policy_version)


def load(ledger, generator, version):
    checksums = {"checksum": "abc", "published": "def"}  # each as it was found
    ledger.events.note("load", role=generator, version=version, **checksums)


def test_a_step_record_says_what_was_trained_with_which_weights(tmp_path):
    ledger, receipts = make(tmp_path)
    asyncio.run(train(ledger, 1))
    load(ledger, "generator_1", 1)
    tokens = {0: {"trained": 7}, 1: {"trained": 11}}
    receipts.step(1, 1, {0: 18}, 0.75, "hash", group_tokens=tokens)
    start, step = read(tmp_path)
    assert start == {
        "record": "start",
        "attempt": 0,
        "format": 2,
        "steps_done": 0,
        "policy_version": 0,
        "num_steps": 3,
        "max_staleness": 1,
        "groups_per_step": 2,
        "group_size": 2,
        "carried": {},
    }
    events, groups = step.pop("events"), step.pop("groups")
    acknowledged = {"generator": "generator_1", "version": 1, "checksum": "abc", "published": "def"}
    assert step == {
        "record": "step",
        "attempt": 0,
        "step": 1,
        "trained_from": 0,
        "policy_version": 1,
        "token_versions": {"0": 18},
        "max_staleness": 0,
        "correction_mass": 0.75,
        "trained_share": 1.0,  # 2 groups of 2 responses, of 4.5 sampled tokens
        "batch_hash": "hash",
        "tokens": {"0": {"trained": 7}, "1": {"trained": 11}},
        "generators": {
            "generator_0": {"version": 0, "checksum": None},
            "generator_1": {"version": 1, "checksum": "abc"},
        },
        "acknowledged": [acknowledged],
        "trained": [
            {"prompt_index": 10, "epoch": 2, "group_id": 0},
            {"prompt_index": 11, "epoch": 2, "group_id": 1},
        ],
    }
    nothing = {"count": 0, "response_tokens_mean": None}
    assert groups == {
        "issued": 2,
        "generated": {"count": 2, "response_tokens_mean": 4.5},
        "filtered": nothing,
        "dropped": {"stale": nothing, "failed": nothing},
        "trained": {"count": 2, "response_tokens_mean": 4.5},
    }
    assert events == [
        {"issued": 0, "prompt_index": 10, "epoch": 2},
        {"generated": 0, "response_tokens": 3.5},
        {"issued": 1, "prompt_index": 11, "epoch": 2},
        {"generated": 1, "response_tokens": 5.5},
        {"trained": 0},
        {"trained": 1},
    ]


def test_the_lengths_of_dropped_groups_can_be_compared_with_those_of_the_trained(tmp_path):
    ledger, receipts = make(tmp_path)

    async def run():
        for reason, tokens in (("stale", [90, 100]), ("filtered", [1, 2]), ("other", [7, 7])):
            entry = await ledger.admit("test", 1)
            await ledger.finish_generation(entry.group_id, tokens)
            await ledger.drop([entry.group_id], reason, reissue=reason == "stale")
        lost = await ledger.admit("test", 1)
        await ledger.drop([lost.group_id], "failed", reissue=True)
        await train(ledger, 1)

    asyncio.run(run())
    receipts.step(1, 1, {0: 18}, 1.0, "hash")
    record = read(tmp_path)[-1]
    groups = record["groups"]
    assert groups["dropped"] == {
        "stale": {"count": 1, "response_tokens_mean": 95.0},
        "failed": {"count": 1, "response_tokens_mean": None},
        "other": {"count": 1, "response_tokens_mean": 7.0},
    }
    assert groups["filtered"] == {"count": 1, "response_tokens_mean": 1.5}
    assert groups["trained"] == {"count": 2, "response_tokens_mean": 4.5}
    dropped = [event for event in record["events"] if "dropped" in event]
    assert dropped[0] == {"dropped": 0, "reason": "stale", "reissue": True, "tokens": 190}
    assert [event["tokens"] for event in dropped] == [190, 3, 14, None]


def test_each_record_holds_only_what_happened_since_the_last(tmp_path):
    ledger, receipts = make(tmp_path)
    for step in (1, 2):
        load(ledger, "generator_0", step - 1)
        asyncio.run(train(ledger, step))
        receipts.step(step, step, {step - 1: 18}, 1.0, "hash")
    record = read(tmp_path)[-1]
    assert [trained["group_id"] for trained in record["trained"]] == [2, 3]
    assert [said["version"] for said in record["acknowledged"]] == [1]
    assert record["trained_from"] == 1


def test_a_skipped_step_keeps_the_version_and_nan_becomes_null(tmp_path):
    ledger, receipts = make(tmp_path)
    asyncio.run(train(ledger, 0))
    receipts.step(1, 0, {}, math.nan, "hash")
    record = read(tmp_path)[-1]
    assert (record["trained_from"], record["policy_version"]) == (0, 0)
    assert record["max_staleness"] is record["correction_mass"] is None


def test_the_end_record_of_a_failed_run_says_what_is_left_and_claims_nothing(tmp_path):
    ledger, receipts = make(tmp_path)

    async def run():
        await train(ledger, 1)
        receipts.step(1, 1, {0: 18}, 1.0, "hash")
        handed_back = await ledger.admit("test", 1)
        buffered, _ = await ledger.admit("test", 1), await ledger.admit("test", 1)
        await ledger.finish_generation(buffered.group_id, [1, 2])
        await ledger.enter_buffer(buffered.group_id)
        await ledger.drop([handed_back.group_id], "failed", reissue=True)

    asyncio.run(run())
    receipts.close()
    receipts.close()  # the second time nothing happens
    *_, end = read(tmp_path)
    assert len(read(tmp_path)) == 3
    assert (end["record"], end["finished"], end["step"]) == ("end", False, 1)
    assert end["living"] == [
        {"group_id": 3, "prompt_index": 13, "epoch": 2, "state": "buffered", "tokens": 3},
        {"group_id": 4, "prompt_index": 14, "epoch": 2, "state": "in_flight", "tokens": None},
    ]
    assert end["waiting"] == [{"prompt_index": 12, "epoch": 2}]


def test_the_last_step_without_its_record_does_not_count_as_finished(tmp_path):
    ledger, receipts = make(tmp_path, num_steps=1)
    asyncio.run(train(ledger, 1))
    receipts.close()
    assert read(tmp_path)[-1]["finished"] is False


def test_a_second_attempt_appends_and_cuts_a_torn_line(tmp_path):
    receipts = make(tmp_path)[1]
    receipts.close()
    before = read(tmp_path)
    with (tmp_path / "receipts.jsonl").open("a") as file:
        file.write('{"record": "st')
    make(tmp_path, attempt=1)[1].close()
    assert read(tmp_path)[:2] == before
    assert [record["attempt"] for record in read(tmp_path)] == [0, 0, 1, 1]


def test_the_next_attempt_goes_on_in_the_same_file_with_the_same_settings(tmp_path):
    ledger, receipts = make(tmp_path)
    asyncio.run(train(ledger, 1))
    receipts.step(1, 1, {0: 18}, 0.75, "hash")
    receipts.close()
    receipts.begin_attempt(3)
    receipts.close()
    first, _, _, start, end = read(tmp_path)
    sizes = {"attempt": 3, "steps_done": 1, "policy_version": 1}
    assert start == first | sizes
    assert sorted(end["generators"]) == ["generator_0", "generator_1"]


def test_a_resumed_attempt_starts_lost_groups_again_and_knows_the_lengths_of_the_others(tmp_path):
    before, receipts = make(tmp_path)

    async def fill():
        for _ in range(3):
            await before.admit("test", 1)
        for group_id in (0, 2):
            await before.finish_generation(group_id, [7, 9])
        await before.enter_buffer(2)

    asyncio.run(fill())
    receipts.close()
    ledger = new_ledger()
    ledger.load_state_dict(before.state_dict())
    resumed = Receipts(tmp_path / "receipts.jsonl", ledger, 1, **SETTINGS)

    async def go_on():
        entry = await ledger.admit("test", 1)
        assert entry.group_id == 0
        await ledger.finish_generation(0, [3, 4])
        await ledger.enter_buffer(0)
        await ledger.take([0, 2])
        ledger.finish_step(1)

    asyncio.run(go_on())
    resumed.step(1, 1, {0: 18}, 1.0, "hash")
    record = read(tmp_path)[-1]
    assert record["events"] == [
        {"restarted": 0},
        {"restarted": 1},
        {"generated": 0, "response_tokens": 3.5},
        {"trained": 2},
        {"trained": 0},
    ]
    assert record["groups"]["issued"] == 0
    assert record["groups"]["trained"] == {"count": 2, "response_tokens_mean": 5.75}


def test_a_group_that_lost_its_generator_is_restarted_and_not_issued_again(tmp_path):
    ledger, receipts = make(tmp_path)

    async def run():
        lost = await ledger.admit("generator_0", 1)
        ledger.give_back(lost)
        assert (await ledger.admit("generator_1", 1)) is lost

    asyncio.run(run())
    receipts.close()
    *_, end = read(tmp_path)
    assert end["events"] == [{"issued": 0, "prompt_index": 10, "epoch": 2}, {"restarted": 0}]
    assert end["groups"]["issued"] == 1
