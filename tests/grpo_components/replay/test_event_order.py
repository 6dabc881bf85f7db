"""A replay's events happen in the recorded order, or end it with a clear error; it never hangs."""

import asyncio
import io
import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_components.errors import ReplayError
from grpo_components.replay.event_order import ORDERED, Turns


def lines(file):
    return [json.loads(line) for line in file.getvalue().splitlines()]


def recorded(*groups):
    """The log of a run in which these groups finished in this order."""
    file = io.StringIO()
    turns = Turns(file)
    turns.note("start", cpus=2)
    for group in groups:
        turns.happened("finish", group=group, response_tokens=[group])
    return lines(file)


def replay(events, timeout_s=20.0):
    return Turns(io.StringIO(), recorded=events, timeout_s=timeout_s)


def test_a_new_run_waits_for_nobody_and_every_line_says_what_happened():
    file = io.StringIO()
    turns = Turns(file, attempt=3)
    pending = turns.take("finish", group=7, response_tokens=[1, 2])
    with pytest.raises(StopIteration):  # no other task has run meanwhile
        pending.send(None)
    turns.note("load", role="generator_0", version=1)
    finish, load = lines(file)
    assert finish.pop("time") <= load.pop("time")
    assert finish == {
        **{"event": "finish", "number": 0, "attempt": 3},
        **{"group": 7, "response_tokens": [1, 2]},
    }
    assert load == {
        **{"event": "load", "number": 1, "attempt": 3},
        **{"role": "generator_0", "version": 1},
    }
    assert turns.decided("pull", True, role="generator_0", cause="group 1")
    assert not turns.decided("pull", False, role="generator_0", cause="group 1")
    assert turns.outcome() == ""


@given(st.permutations(range(6)), st.permutations(range(6)))
def test_whoever_comes_first_the_recorded_order_is_kept(order, coming):
    """Each event happens before the one after it, and nothing runs between a turn and its event."""
    events, happened = recorded(*order), []

    async def finish(turns, group):
        await turns.turn("finish", group=group)
        happened.append(group)
        turns.happened("finish", group=group, response_tokens=[group])
        assert happened[-1] == group

    async def run():
        turns = replay(events)
        await asyncio.gather(*(finish(turns, group) for group in coming))
        return turns

    turns = asyncio.run(run())
    assert happened == list(order)
    assert turns.outcome() == "6 events in the recorded order"


def test_several_may_wait_for_turns_of_the_same_name_and_learn_that_none_is_left():
    file = io.StringIO()
    turns = Turns(file)
    for group, role in enumerate(["generator_0", "generator_1", "generator_0"]):
        turns.happened("issue", role=role, group=group)
    events, issued = lines(file), []

    async def loop(turns, role):
        while await turns.turn("issue", role=role):
            turns.happened("issue", role=role, group=len(issued))
            issued.append(role)
            await asyncio.sleep(0)

    async def run():
        turns = replay(events)
        roles = ["generator_1", "generator_0", "generator_0", "generator_0"]
        await asyncio.gather(*(loop(turns, role) for role in roles))

    asyncio.run(run())
    assert issued == ["generator_0", "generator_1", "generator_0"]


def test_a_stalled_replay_names_the_next_event_and_who_waits():
    async def run():
        turns = replay(recorded(4, 5, 6), timeout_s=0.01)
        await asyncio.gather(turns.turn("finish", group=6), turns.turn("finish", group=5))

    with pytest.raises(ReplayError) as error:
        asyncio.run(run())
    text = str(error.value)
    assert "for 0.01 s nothing happened" in text
    assert "number 1, finish (group 4, response_tokens [4])" in text
    assert "waiting for their turn: finish (group 5); finish (group 6)" in text


def test_time_counts_from_the_last_event_not_from_when_one_began_to_wait():
    async def run():
        turns = replay(recorded(*range(6), 9), timeout_s=0.2)
        last = asyncio.create_task(turns.turn("finish", group=9))
        for group in range(6):
            await asyncio.sleep(0.06)
            await turns.take("finish", group=group, response_tokens=[group])
        assert await last

    asyncio.run(run())


@pytest.mark.parametrize(
    ("event", "fields", "there"),
    [
        ("finish", {"group": 4, "response_tokens": [3]}, "finish (group 4, response_tokens [3])"),
        ("finish", {"group": 8, "response_tokens": [8]}, "finish (group 8, response_tokens [8])"),
        ("step", {"step": 1, "version": 1}, "step (step 1, version 1)"),
    ],
)
def test_another_event_ends_the_replay_with_both(event, fields, there):
    async def run():
        await replay(recorded(4, 5)).take(event, **fields)

    with pytest.raises(ReplayError) as error:
        asyncio.run(run())
    had = "event 1: the recorded run had finish (group 4, response_tokens [4])"
    assert had in str(error.value) and str(error.value).endswith(f"the replay has {there}")


def test_an_event_after_the_recorded_end_and_an_end_before_it_are_divergences():
    turns = replay(recorded(4))
    with pytest.raises(ReplayError, match=r"ended before event 1: finish \(group 4"):
        turns.outcome()
    turns.happened("finish", group=4, response_tokens=[4])
    with pytest.raises(ReplayError, match="the recorded run had its end"):
        turns.happened("finish", group=5, response_tokens=[5])


def test_what_a_replay_decides_is_in_the_log_and_not_in_its_own_state():
    file = io.StringIO()
    Turns(file).happened("pull", role="generator_0", cause="group 3")
    turns = replay(lines(file))
    assert turns.decided("pull", False, role="generator_0", cause="group 3")
    assert not turns.decided("pull", True, role="generator_0", cause="group 4")
    assert not turns.decided("pull", True, role="generator_1", cause="group 3")
    turns.happened("pull", role="generator_0", cause="group 3")
    assert not turns.decided("pull", True, role="generator_0", cause="group 3")


def test_a_replays_own_log_can_be_replayed():
    """Envelopes aside it is the same; notes, which nobody waits for, may lie elsewhere."""
    events = recorded(3, 1, 2)
    file = io.StringIO()
    turns = Turns(file, recorded=events, timeout_s=1)
    for event in events:
        fields = {k: v for k, v in event.items() if k not in ("event", "number", "attempt", "time")}
        if event["event"] in ORDERED:
            turns.happened(event["event"], **fields)

    def plain(log):
        return [
            {k: v for k, v in e.items() if k not in ("time", "number")}
            for e in log
            if e["event"] in ORDERED
        ]

    assert plain(lines(file)) == plain(events)


def test_the_log_costs_little():
    """Beside a step of at least tens of milliseconds with some tens of events."""
    file, turns = io.StringIO(), None
    turns = Turns(file)

    async def run():
        loop = asyncio.get_running_loop()
        started = loop.time()
        for group in random.sample(range(5000), 2000):
            await turns.take("finish", group=group, response_tokens=[16] * 8)
        return (loop.time() - started) / 2000

    assert asyncio.run(run()) < 1e-3
