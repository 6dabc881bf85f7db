"""A replay's events happen in the recorded order, or end it with a clear error; it never hangs."""

import asyncio
from functools import partial

import pytest

from grpo_components.errors import ReplayError
from grpo_components.exchange.event_order import EventOrder
from grpo_tools.replay.recorded_run import RecordedOrder


def live():
    """The event order of a live run, and the log that it makes."""
    log = []
    order = EventOrder(listeners=[lambda event: log.append(event | {"number": len(log)})])
    return order, log


def recorded(*groups):
    """The log of a run in which these groups finished in this order."""
    order, log = live()
    order.note("start", cpus=2)
    for group in groups:
        order.record("finish", group=group, response_tokens=[group])
    return log


def replay(events, timeout_s=20.0):
    return EventOrder(recording=RecordedOrder(events, timeout_s))


def test_a_live_run_waits_for_nobody_and_tells_every_listener():
    first, second = [], []
    order = EventOrder(attempt=3, listeners=[first.append])
    order.listen(second.append)
    pending = order.take("finish", group=7, response_tokens=[1, 2])
    with pytest.raises(StopIteration):  # no other task has run meanwhile
        pending.send(None)
    order.note("load", role="generator_0", version=1)
    assert (
        first
        == second
        == [
            {"event": "finish", "attempt": 3, "group": 7, "response_tokens": [1, 2]},
            {"event": "load", "attempt": 3, "role": "generator_0", "version": 1},
        ]
    )


def test_what_a_step_trained_is_not_compared():
    order, log = live()
    order.record("step", {"correction_mass": 0.5}, step=1)
    again = replay(log)
    again.record("step", {"correction_mass": 0.25}, step=1)
    assert again.recording.summary() == "1 events in the recorded order"


def test_several_may_wait_for_the_same_event_and_see_when_none_is_left():
    order, events = live()
    issued = []
    for group, role in enumerate(["generator_0", "generator_1", "generator_0"]):
        order.record("issue", role=role, group=group)

    async def loop(order, role):
        while await order.wait_turn("issue", role=role):
            order.record("issue", role=role, group=len(issued))
            issued.append(role)
            await asyncio.sleep(0)

    async def run():
        order = replay(events)
        roles = ["generator_1", "generator_0", "generator_0", "generator_0"]
        await asyncio.gather(*(loop(order, role) for role in roles))

    asyncio.run(run())
    assert issued == ["generator_0", "generator_1", "generator_0"]


def test_a_stalled_replay_names_the_next_event_and_who_waits():
    async def run():
        order = replay(recorded(4, 5, 6), timeout_s=0.01)
        await asyncio.gather(order.wait_turn("finish", group=6), order.wait_turn("finish", group=5))

    with pytest.raises(ReplayError) as error:
        asyncio.run(run())
    text = str(error.value)
    assert "for 0.01 s nothing happened" in text
    assert "number 1, finish (group 4, response_tokens [4])" in text
    assert "waiting for their turn: finish (group 5); finish (group 6)" in text


def test_time_counts_from_the_last_event_not_from_when_one_began_to_wait():
    async def run():
        seconds = 0.0
        asyncio.get_running_loop().time = lambda: seconds
        order = replay(recorded(*range(6), 9), timeout_s=20)
        last = asyncio.create_task(order.wait_turn("finish", group=9))
        for group in range(6):
            await ticks()
            seconds += 19
            await ticks()  # a time-out that is over would end the wait here
            await order.take("finish", group=group, response_tokens=[group])
        assert await last

    async def ticks():
        for _ in range(5):
            await asyncio.sleep(0)

    asyncio.run(run())


def test_another_event_ends_the_replay_with_both():
    with pytest.raises(ReplayError) as error:
        asyncio.run(replay(recorded(4, 5)).take("finish", group=4, response_tokens=[3]))
    assert "event 1: the recorded run had finish (group 4, response_tokens [4])" in str(error.value)
    assert str(error.value).endswith("the replay has finish (group 4, response_tokens [3])")


def test_an_event_after_the_recorded_end_and_an_end_before_it_are_divergences():
    order = replay(recorded(4))
    with pytest.raises(ReplayError, match=r"ended before event 1: finish \(group 4"):
        order.recording.summary()
    order.record("finish", group=4, response_tokens=[4])
    with pytest.raises(ReplayError, match="the recorded run had its end"):
        order.record("finish", group=5, response_tokens=[5])


def test_what_should_happen_in_a_replay_is_in_the_recording_and_not_in_its_own_state():
    order, log = live()
    order.record("pull", role="generator_0", cause="group 3")
    order = replay(log)
    has = partial(order.recording.has, "pull")
    assert has(role="generator_0", cause="group 3")
    assert not has(role="generator_0", cause="group 4")
    assert not has(role="generator_1", cause="group 3")
    order.record("pull", role="generator_0", cause="group 3")
    assert not has(role="generator_0", cause="group 3")


def test_the_weights_that_a_replay_loads_are_compared_with_the_recorded_ones():
    order, log = live()
    order.note("load", role="generator_0", version=2, checksum="abc")
    again = replay(log)
    for version, checksum in ((2, "abc"), (3, "def")):  # of version 3 the recording says nothing
        again.note("load", role="generator_0", version=version, checksum=checksum)
    with pytest.raises(ReplayError) as error:
        again.note("load", role="generator_0", version=2, checksum="def")
    assert all(part in str(error.value) for part in ("step 3", "version 2", "abc", "def"))
