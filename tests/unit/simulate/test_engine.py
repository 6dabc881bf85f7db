"""Virtual time passes only while all tasks wait; an engine in it batches continuously."""

import asyncio
from collections import Counter

import pytest

from grpo_tools.simulate.engine import VirtualEngine
from grpo_tools.simulate.times import StepTime
from grpo_tools.simulate.virtual_time import DeadlockError, run_in_virtual_time


def with_engine(scenario, step_time, load_s=0.0, max_num_seqs=8):
    """Run a scenario of one engine; returns what it returns."""

    async def run():
        engine = VirtualEngine(step_time, load_s, max_num_seqs)
        running = asyncio.create_task(engine.run())
        try:
            return await scenario(engine)
        finally:
            running.cancel()

    return run_in_virtual_time(run())


def now():
    return asyncio.get_running_loop().time()


def test_a_request_enters_after_the_present_step():
    async def scenario(engine):
        first = asyncio.ensure_future(engine.sample(10))
        await asyncio.sleep(2.5)
        await engine.sample(2)
        second_s = now()
        await first
        return second_s, now()

    assert with_engine(scenario, StepTime(1.0, 0.0, 0.0)) == pytest.approx((5.0, 10.0))


def test_tokens_carry_the_version_of_the_weights_that_sampled_them():
    async def scenario(engine):
        response = asyncio.ensure_future(engine.sample(6))
        await asyncio.sleep(1.5)
        await engine.load(3)
        loaded_s = now()
        await asyncio.sleep(1.2)
        await engine.load(4)
        return loaded_s, await response, now()

    loaded_s, versions, end = with_engine(scenario, StepTime(1.0, 0.0, 0.0), load_s=0.5)
    assert loaded_s == pytest.approx(2.5)
    assert versions == Counter({0: 2, 3: 2, 4: 2})
    assert end == pytest.approx(6 + 2 * 0.5)


def test_a_day_passes_at_once_and_timers_keep_their_order():
    seen = []

    async def wait(name, seconds):
        await asyncio.sleep(seconds)
        seen.append((name, asyncio.get_running_loop().time()))

    async def run():
        await asyncio.gather(wait("late", 86400.0), wait("early", 1.5), wait("same", 1.5))
        return asyncio.get_running_loop().time()

    assert run_in_virtual_time(run()) == 86400.0
    assert seen == [("early", 1.5), ("same", 1.5), ("late", 86400.0)]


def test_who_waits_forever_is_no_silent_wait():
    with pytest.raises(DeadlockError, match="every task waits"):
        run_in_virtual_time(asyncio.Event().wait())
