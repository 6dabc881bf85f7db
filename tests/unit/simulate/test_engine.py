"""Virtual time passes only while all tasks wait; an engine in it batches continuously."""

import asyncio
from collections import Counter

import pytest

from grpo_tools.simulate.engine import VirtualEngine
from grpo_tools.simulate.times import StepTime
from grpo_tools.simulate.virtual_time import DeadlockError, run_in_virtual_time


def with_engine(scenario, step_time, load_s=0.0, max_num_seqs=8):
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


def test_who_waits_forever_is_no_silent_wait():
    with pytest.raises(DeadlockError, match="every task waits"):
        run_in_virtual_time(asyncio.Event().wait())
