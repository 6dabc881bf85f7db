"""Groups start when all of their responses have room, whichever responses ended before."""

import asyncio
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_components.rollout.sequence_budget import SequenceBudget

NOW = 0.001

pytestmark = pytest.mark.anyio


ENDS = st.lists(st.tuples(st.integers(0, 10**6), st.booleans()), max_size=40)
"""Which response ends, and whether a group begins instead."""


@given(st.integers(1, 4), st.integers(1, 4), ENDS)
async def test_never_more_responses_than_have_room_and_no_room_is_lost(groups, group_size, ends):
    budget, running, granted = SequenceBudget(groups, group_size), [], 0
    for which, begins in ends:
        free = groups * group_size - len(running) - granted * group_size
        if free >= group_size:  # else the call would wait
            number = await budget.reserve(60)
            assert number == free // group_size
            granted += number
        if granted and begins:
            end = budget.begin_group()
            running += [(end, response) for response in range(group_size)]
            granted -= 1
        elif running:
            end, response = running.pop(which % len(running))
            end(response)
            end(response)  # counts once
            await asyncio.sleep(0)
    for end, response in running:
        end(response)
    await asyncio.sleep(0)
    budget.begin_attempt()  # what was reserved is free again
    assert await budget.reserve(60) == groups


async def test_a_wait_ends_with_the_response_that_makes_room():
    budget = SequenceBudget(1, 3)
    assert await budget.reserve(60) == 1
    end = budget.begin_group()
    waiting = asyncio.create_task(budget.reserve(60))
    for response in (2, 0):
        end(response)
        await asyncio.sleep(0)
    assert not waiting.done()
    thread = threading.Thread(target=end, args=(1,))
    thread.start()
    assert await waiting == 1
    thread.join()


async def test_a_restarted_groups_responses_count_without_a_reservation():
    budget = SequenceBudget(2, 2)
    ends = [budget.begin_group() for _ in range(3)]  # three were in flight, by reservation
    assert await budget.reserve(NOW) == 0
    for end in ends[:2]:
        end(0), end(1)
    await asyncio.sleep(0)
    assert await budget.reserve(60) == 1


async def test_a_new_attempt_ends_the_waits_of_the_last_one():
    budget = SequenceBudget(1, 2)
    end = budget.begin_group()
    waiting = asyncio.create_task(budget.reserve(60))
    await asyncio.sleep(0)
    budget.begin_attempt()
    end(0), end(1)
    assert await waiting == 0
    assert await budget.reserve(60) == 1
