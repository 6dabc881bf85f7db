"""Admission and the account of groups, over random schedules of a simulated run."""

import asyncio
import random
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lib.properties import many

from grpo_components.exchange.group_reuse import GroupReuse
from grpo_components.exchange.ledger import Ledger
from grpo_components.exchange.staleness import StalenessContract


def endless_prompts():
    index = 0
    while True:
        yield {"prompt_index": index}, 0
        index += 1


def make(eta, groups_per_step, num_steps):
    return Ledger(StalenessContract(eta, groups_per_step), num_steps, endless_prompts())


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


def test_synchronous_admission_is_exactly_one_batch():
    async def run():
        ledger = make(eta=0, groups_per_step=3, num_steps=2)
        first = await admit_all(ledger)
        assert [entry.group_id for entry in first] == [0, 1, 2]
        await ledger.take([0, 1, 2])
        assert await admit_all(ledger) == []
        await ledger.publish(1)
        ledger.finish_step(1)
        second = await admit_all(ledger)
        assert [(e.group_id, e.needed_version) for e in second] == [(3, 1), (4, 1), (5, 1)]

    asyncio.run(run())


def test_no_group_is_admitted_that_no_step_needs():
    async def run():
        ledger = make(eta=9, groups_per_step=2, num_steps=3)
        assert len(await admit_all(ledger)) == 6

    asyncio.run(run())


def test_a_skipped_step_blocks_nothing():
    async def run():
        ledger = make(eta=0, groups_per_step=2, num_steps=2)
        await admit_all(ledger)
        await ledger.take([0, 1])
        ledger.finish_step(0)  # NaN: the version stays, nothing is published
        assert len(await admit_all(ledger)) == 2

    asyncio.run(run())


def test_a_dropped_group_is_replaced_by_its_own_prompt_first():
    async def run():
        ledger = make(eta=1, groups_per_step=1, num_steps=5)
        first, second = await admit_all(ledger)
        await ledger.drop([first.group_id], "stale", reissue=True)
        (again,) = await admit_all(ledger)
        assert again.prompt is first.prompt
        assert again.group_id == second.group_id + 1
        assert ledger.dropped_groups == {"stale": 1}

    asyncio.run(run())


def test_a_filtered_group_is_replaced_by_another_prompt():
    async def run():
        ledger = make(eta=0, groups_per_step=1, num_steps=5)
        (first,) = await admit_all(ledger)
        await ledger.drop([first.group_id], "failed", reissue=False)
        (second,) = await admit_all(ledger)
        assert second.prompt["prompt_index"] == first.prompt["prompt_index"] + 1

    asyncio.run(run())


def test_the_target_step_is_the_turn_of_the_place_in_the_queue():
    async def run():
        ledger = make(eta=1, groups_per_step=2, num_steps=4)
        assert [e.target_step for e in await admit_all(ledger)] == [0, 0, 1, 1]
        await ledger.take([0, 1])
        ledger.finish_step(0)  # skipped: the version stays, the count of steps does not
        assert [e.target_step for e in await admit_all(ledger)] == [2, 2]

    asyncio.run(run())


def test_reuse_lets_in_no_more_groups_than_later_steps_take_and_as_many_as_the_next_needs():
    """Two of four groups of a step may be reused ones; only the first step cannot reuse any."""

    async def run():
        ledger = make(eta=1, groups_per_step=4, num_steps=3)
        ledger.reuse = GroupReuse(StalenessContract(1, 4), 0.5, 2)
        events = recorded(ledger)
        first = await admit_all(ledger)
        # Four for step 0, two for step 1; the others need version 1 to be fresh in step 2.
        assert [(e.target_step, e.needed_version) for e in first] == 4 * [(0, -1)] + 2 * [(1, 0)]
        worths = [SimpleNamespace(group_id=n, rewards=[0, n], oldest_version=0) for n in range(4)]
        await ledger.take([0, 1, 2, 3], (), worths)
        await ledger.publish(1)
        ledger.finish_step(1)
        assert ledger.next_batch(4)[0] == 2
        assert [e.group_id for e in ledger.reuse.chosen] == [2, 3]
        assert [e.target_step for e in await admit_all(ledger)] == [2, 2]
        for number in (4, 5):
            await ledger.finish_generation(number, [1])
            await ledger.enter_buffer(number)
        worths = [SimpleNamespace(group_id=n, rewards=[1, 1], oldest_version=0) for n in (4, 5)]
        batch = await ledger.take([4, 5], (), worths)
        assert [e.group_id for e in batch] == [4, 5, 2, 3]
        await ledger.publish(2)
        ledger.finish_step(2)
        # Nothing is left to reuse: the last step needs two more groups than were let in for it.
        assert ledger.next_batch(4)[0] == 4 and len(await admit_all(ledger)) == 2
        said = [event["reused"] for event in events if event["event"] == "sample"]
        tokens = {"use": 2}
        assert said == [[], [{"group": 2, **tokens}, {"group": 3, **tokens}]]
        assert ledger.trained_groups == 6 and ledger.issued == 10

    asyncio.run(run())


def test_a_step_waits_for_groups_that_too_few_new_ones_of_the_steps_after_it_would_make_stale():
    """Without reuse, the step after the next would take all four groups in flight, in time."""

    async def run():
        ledger = make(eta=2, groups_per_step=4, num_steps=9)
        ledger.reuse = GroupReuse(StalenessContract(2, 4), 0.5, 2)
        assert [entry.group_id for entry in await admit_all(ledger)] == list(range(8))
        for entry in ledger.living():
            entry.start_version = 0
        worths = [SimpleNamespace(group_id=n, rewards=[0, 1], oldest_version=0) for n in range(4)]
        await ledger.take([0, 1, 2, 3], (), worths)
        await ledger.publish(1)
        ledger.finish_step(1)
        for entry in await admit_all(ledger):
            entry.start_version = 1
            await ledger.enter_buffer(entry.group_id)
        with pytest.raises(TimeoutError, match="make stale"):
            await ledger.until_none_is_doomed(4, 0.001)
        for number in (4, 5):
            await ledger.enter_buffer(number)
        await ledger.until_none_is_doomed(4, 1)

    asyncio.run(run())


def test_a_step_waits_for_its_batch_before_it_looks_for_groups_that_it_makes_stale():
    """Else one that starts meanwhile with old weights is overtaken by one with newer ones."""

    async def run():
        ledger = make(eta=1, groups_per_step=1, num_steps=3)
        await ledger.enter_buffer((await ledger.admit("test", 1)).group_id)
        await ledger.take([0])
        await ledger.publish(1)
        ledger.finish_step(1)
        waiting = asyncio.create_task(ledger.until_none_is_doomed(1, 5))
        await asyncio.sleep(0)
        old, new = [await ledger.admit("test", 1) for _ in range(2)]
        assert (old.needed_version, new.needed_version) == (0, 1)
        await ledger.enter_buffer(new.group_id)
        await asyncio.sleep(0)
        assert not waiting.done(), "this step is the last that may train the older one"
        await ledger.enter_buffer(old.group_id)
        await waiting

    asyncio.run(run())


def test_every_change_is_one_event():
    async def run():
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

    asyncio.run(run())


def test_the_wait_for_doomed_groups_ends_when_they_are_buffered():
    async def run():
        ledger = make(eta=0, groups_per_step=1, num_steps=5)
        (entry,) = await admit_all(ledger)
        with pytest.raises(TimeoutError, match=r"training loop .* 0\.001 s"):
            await ledger.until_none_is_doomed(1, 0.001)
        waiting = asyncio.create_task(ledger.until_none_is_doomed(1, 5))
        await asyncio.sleep(0)
        await ledger.enter_buffer(entry.group_id)
        await waiting

    asyncio.run(run())


def test_an_admission_that_is_never_granted_says_what_it_waited_for():
    async def run():
        ledger = make(eta=0, groups_per_step=1, num_steps=5)
        await admit_all(ledger)
        with pytest.raises(TimeoutError, match=r"generator_0.* version 0; .* 0\.001 s"):
            await ledger.admit("generator_0", timeout_s=0.001)

    asyncio.run(run())


def test_no_wait_ends_while_an_evaluation_keeps_the_weights():
    """However long it takes; the time-out counts from its end."""

    async def run():
        ledger = make(eta=0, groups_per_step=1, num_steps=5)
        await admit_all(ledger)
        with ledger.pin_weights():
            waiting = asyncio.create_task(ledger.admit("generator_0", timeout_s=0.001))
            done, _ = await asyncio.wait([waiting], timeout=0.05)
            assert not done
        with pytest.raises(TimeoutError):
            await waiting

    asyncio.run(run())


@settings(max_examples=many(150))
@given(
    eta=st.integers(0, 3),
    groups_per_step=st.integers(1, 4),
    seed=st.integers(0, 2**32),
    data=st.data(),
)
def test_random_runs_end_within_the_bound_and_lose_nothing(eta, groups_per_step, seed, data):
    """Generators of random speed that die, skipped steps, failed and filtered groups, pushes every
    n <= eta + 1 steps; every choice among what can happen next, so no timing is left out."""
    push_every = data.draw(st.integers(1, eta + 1))
    wait = data.draw(st.booleans())
    num_steps, rng = 6, random.Random(seed)

    async def run():
        ledger = make(eta, groups_per_step, num_steps)
        events = recorded(ledger)
        flying, ready, trained = [], [], []
        contract = StalenessContract(eta, groups_per_step)
        for _ in range(10_000):
            if ledger.finished:
                break
            moves = []
            for entry in await admit_all(ledger):
                # the generator has at least the needed version, at most the published one
                entry.start_version = rng.randint(
                    max(0, entry.needed_version), ledger.published_version
                )
                flying.append(entry)
            if flying:
                moves.append("finish")
            now = ledger.policy_version
            doomed = contract.must_wait(
                [e.start_version for e in ready], [e.start_version for e in flying], now
            )
            stale = [e for e in ready if not contract.may_train(e.start_version, now)]
            if stale:
                moves = ["sweep"]
            elif len(ready) >= groups_per_step and not (wait and doomed):
                moves.append("train")
            assert moves, "deadlock: nothing in flight and no batch"
            move = rng.choice(moves)
            if move == "finish":
                entry = flying.pop(rng.randrange(len(flying)))
                chance = rng.random()
                if chance < 0.05:  # its generator died
                    await ledger.drop([entry.group_id], "failed", reissue=True)
                elif chance < 0.1:
                    await ledger.drop([entry.group_id], "failed")
                elif chance < 0.2:
                    await ledger.finish_generation(entry.group_id, [1])
                    await ledger.drop([entry.group_id], "filtered")
                else:
                    await ledger.finish_generation(entry.group_id, [1])
                    ready.append(entry)
                    await ledger.enter_buffer(entry.group_id)
            elif move == "sweep":
                assert not wait and eta > 0, "dropped as stale where that must not happen"
                for entry in stale:
                    ready.remove(entry)
                await ledger.drop([e.group_id for e in stale], "stale", reissue=True)
            else:
                ready.sort(key=lambda e: (e.start_version, e.group_id))
                batch, ready = ready[:groups_per_step], ready[groups_per_step:]
                assert all(ledger.policy_version - e.start_version <= eta for e in batch)
                await ledger.take([e.group_id for e in batch])
                version = ledger.policy_version + (rng.random() > 0.2)
                if version - ledger.published_version >= push_every:
                    await ledger.publish(version)
                ledger.finish_step(version)
                trained += batch
        assert ledger.finished
        assert len({e.group_id for e in trained}) == num_steps * groups_per_step
        accounted = ledger.trained_groups + sum(ledger.dropped_groups.values())
        assert ledger.issued == accounted
        assert not (flying or ready or ledger.living() or ledger.waiting_prompts)
        prompts = [e.prompt_index for e in trained]
        assert len(set(prompts)) == len(prompts)
        ended = [g for e in events if e["event"] in ("sample", "drop") for g in e["groups"]]
        assert sorted(ended) == list(range(ledger.issued))

    asyncio.run(run())


def test_a_group_that_is_given_back_is_admitted_again_first_under_its_number():
    async def run():
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

    asyncio.run(run())
