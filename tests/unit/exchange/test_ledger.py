"""Admission, and the account of groups; `test_staleness` plays random schedules against it."""

import asyncio
from types import SimpleNamespace

import pytest

from grpo_components.exchange.group_reuse import GroupReuse
from grpo_components.exchange.ledger import Ledger
from grpo_components.exchange.staleness import StalenessContract

pytestmark = pytest.mark.anyio


def make(eta, groups_per_step, num_steps):
    prompts = (({"prompt_index": i}, 0) for i in range(10**6))
    return Ledger(StalenessContract(eta, groups_per_step), num_steps, prompts)


def recorded(ledger):
    """Collects the ledger's events from here on."""
    events = []
    ledger.events.listen(events.append)
    return events


async def admit_all(ledger):
    """Admit until the ledger would wait."""
    admitted = []
    while True:
        try:
            entry = await ledger.admit("test", timeout_s=0.001)
        except TimeoutError:
            return admitted
        if entry is None:
            return admitted
        admitted.append(entry)


async def train(ledger, rewards, version):
    """Train groups, given by id with their rewards, and publish `version`; return the batch."""
    worths = [
        SimpleNamespace(group_id=number, rewards=each, oldest_version=0)
        for number, each in rewards.items()
    ]
    batch = await ledger.take(list(rewards), (), worths)
    await ledger.publish(version)
    ledger.finish_step(version)
    return [entry.group_id for entry in batch]


async def test_the_target_step_is_the_turn_of_the_place_in_the_queue():
    ledger = make(eta=1, groups_per_step=2, num_steps=4)
    assert [e.target_step for e in await admit_all(ledger)] == [0, 0, 1, 1]
    await ledger.take([0, 1])
    ledger.finish_step(0)  # skipped: the version stays, the count of steps does not
    assert [e.target_step for e in await admit_all(ledger)] == [2, 2]


async def test_reuse_lets_in_no_more_groups_than_later_steps_take_and_as_many_as_the_next_needs():
    """Two of four groups of a step may be reused ones; only the first step cannot reuse any."""
    ledger = make(eta=1, groups_per_step=4, num_steps=3)
    ledger.reuse = GroupReuse(StalenessContract(1, 4), 0.5, 2)
    events = recorded(ledger)
    first = await admit_all(ledger)
    # Four for step 0, two for step 1; the others need version 1 to be fresh in step 2.
    assert [(e.target_step, e.needed_version) for e in first] == 4 * [(0, -1)] + 2 * [(1, 0)]
    await train(ledger, {n: [0, n] for n in range(4)}, 1)
    assert ledger.next_batch(4)[0] == 2
    assert [e.group_id for e in ledger.reuse.chosen] == [2, 3]
    assert [e.target_step for e in await admit_all(ledger)] == [2, 2]
    for number in (4, 5):
        await ledger.finish_generation(number, [1])
        await ledger.enter_buffer(number)
    assert await train(ledger, {4: [1, 1], 5: [1, 1]}, 2) == [4, 5, 2, 3]
    # Nothing is left to reuse: the last step needs two more groups than were let in for it.
    assert ledger.next_batch(4)[0] == 4 and len(await admit_all(ledger)) == 2
    said = [event["reused"] for event in events if event["event"] == "sample"]
    assert said == [[], [{"group": 2, "use": 2}, {"group": 3, "use": 2}]]
    assert ledger.trained_groups == 6 and ledger.issued == 10


async def test_a_step_waits_for_groups_that_too_few_new_ones_of_later_steps_would_make_stale():
    """Without reuse, the step after the next would take all four groups in flight, in time."""
    ledger = make(eta=2, groups_per_step=4, num_steps=9)
    ledger.reuse = GroupReuse(StalenessContract(2, 4), 0.5, 2)
    assert [entry.group_id for entry in await admit_all(ledger)] == list(range(8))
    for entry in ledger.living():
        entry.start_version = 0
    await train(ledger, {n: [0, 1] for n in range(4)}, 1)
    for entry in await admit_all(ledger):
        entry.start_version = 1
        await ledger.enter_buffer(entry.group_id)
    with pytest.raises(TimeoutError, match="make stale"):
        await ledger.until_none_is_doomed(4, 0.001)
    for number in (4, 5):
        await ledger.enter_buffer(number)
    await ledger.until_none_is_doomed(4, 1)


async def test_a_step_waits_for_its_batch_before_it_looks_for_groups_that_it_makes_stale():
    """Else one that starts meanwhile with old weights is overtaken by one with newer ones."""
    ledger = make(eta=1, groups_per_step=1, num_steps=3)
    await ledger.enter_buffer((await ledger.admit("test", 1)).group_id)
    await train(ledger, {0: [0, 1]}, 1)
    waiting = asyncio.create_task(ledger.until_none_is_doomed(1, 5))
    await asyncio.sleep(0)
    old, new = [await ledger.admit("test", 1) for _ in range(2)]
    assert (old.needed_version, new.needed_version) == (0, 1)
    await ledger.enter_buffer(new.group_id)
    await asyncio.sleep(0)
    assert not waiting.done(), "this step is the last that may train the older one"
    await ledger.enter_buffer(old.group_id)
    await waiting


async def test_every_change_is_one_event():
    ledger = make(eta=1, groups_per_step=1, num_steps=5)
    events = recorded(ledger)
    first, second = await admit_all(ledger)
    assert (first.prompt_index, first.state) == (0, "in_flight")
    await ledger.finish_generation(1, [2, 5])
    assert second.tokens == 7
    await ledger.drop([0], "failed", reissue=True)
    assert ledger.waiting_prompts == [(first.prompt, 0)]
    await ledger.enter_buffer(1)
    await ledger.take([1])
    assert [(e.group_id, e.state) for e in ledger.living()] == [(1, "in_training")]
    ledger.finish_step(1)
    await ledger.admit("test", 1)
    assert ledger.waiting_prompts == []
    assert [tuple(event.values()) for event in events] == [
        # name, attempt, role, group, prompt, epoch, target step, needed version
        ("issue", 0, "test", 0, 0, 0, 0, -1),
        ("issue", 0, "test", 1, 1, 0, 1, 0),
        ("finish", 0, 1, [2, 5]),
        ("drop", 0, [0], "failed", True, [None]),
        ("buffer", 0, 1),
        ("sample", 0, 1, [1]),
        ("step", 0, 1, 0, 1),
        ("issue", 0, "test", 2, 0, 0, 1, 0),
    ]


async def test_an_admission_that_is_never_granted_says_what_it_waited_for():
    ledger = make(eta=0, groups_per_step=1, num_steps=5)
    await admit_all(ledger)
    with pytest.raises(TimeoutError, match=r"generator_0.* version 0; .* 0\.001 s"):
        await ledger.admit("generator_0", timeout_s=0.001)


async def test_no_wait_ends_while_an_evaluation_keeps_the_weights():
    """However long it takes; the time-out counts from its end."""
    ledger = make(eta=0, groups_per_step=1, num_steps=5)
    await admit_all(ledger)
    with ledger.pin_weights():
        waiting = asyncio.create_task(ledger.admit("generator_0", timeout_s=0.001))
        done, _ = await asyncio.wait([waiting], timeout=0.05)
        assert not done
    with pytest.raises(TimeoutError):
        await waiting


async def test_a_group_that_is_given_back_is_admitted_again_first_under_its_number():
    ledger = make(eta=0, groups_per_step=3, num_steps=2)
    entries = await admit_all(ledger)
    await ledger.finish_generation(1, [3, 4])
    entries[1].parts = ("group", "summary")
    events = recorded(ledger)
    ledger.give_back(entries[1])
    assert [entry.group_id for entry in ledger.living()] == [0, 1, 2]
    (again,) = await admit_all(ledger)
    assert (again.group_id, again.prompt_index) == (1, 1)
    assert (again.state, again.parts, again.tokens) == ("in_flight", (), None)
    assert [(e["event"], e["group"]) for e in events] == [("interrupt", 1), ("issue", 1)]
