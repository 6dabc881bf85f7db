"""Virtual time passes only while all tasks wait, and a loop that can never go on says so."""

import asyncio
import time

import pytest

from grpo_tools.simulate.virtual_time import DeadlockError, run_in_virtual_time


def test_a_day_passes_at_once_and_timers_keep_their_order():
    seen = []

    async def wait(name, seconds):
        await asyncio.sleep(seconds)
        seen.append((name, asyncio.get_running_loop().time()))

    async def run():
        await asyncio.gather(wait("late", 86400.0), wait("early", 1.5), wait("same", 1.5))
        return asyncio.get_running_loop().time()

    began = time.perf_counter()
    assert run_in_virtual_time(run()) == 86400.0
    assert time.perf_counter() - began < 60
    assert seen == [("early", 1.5), ("same", 1.5), ("late", 86400.0)]


def test_a_time_out_ends_a_wait_in_virtual_time():
    async def run():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(100):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run_in_virtual_time(run()) == 100


def test_who_waits_forever_is_no_silent_wait():
    with pytest.raises(DeadlockError, match="every task waits"):
        run_in_virtual_time(asyncio.Event().wait())
