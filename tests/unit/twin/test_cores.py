"""Shared cores: every CPU second is done once, and nobody gets more than its part."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_components.twin.cores import Cores, Process
from grpo_components.twin.virtual_time import run_in_virtual_time


def now():
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize(
    ("cores", "seconds", "ends"),
    [
        (2, (1.0, 1.0), (1.0, 1.0)),  # a core each
        (2, (2.0, 2.0, 2.0), (3.0, 3.0, 3.0)),  # two thirds of a core each
        (1, (1.0, 3.0), (2.0, 4.0)),  # half, and alone after that
    ],
)
def test_processes_share_the_cores_equally(cores, seconds, ends):
    async def run():
        shared, found = Cores(cores), {}

        async def work(number, amount):
            await Process(shared).work(amount)
            found[number] = now()

        await asyncio.gather(*(work(i, amount) for i, amount in enumerate(seconds)))
        return found

    assert run_in_virtual_time(run()) == pytest.approx(dict(enumerate(ends)))


def test_the_jobs_of_a_process_share_its_thread():
    async def run():
        process = Process(Cores(2))
        await asyncio.gather(process.work(1.0), process.work(1.0))
        return now()

    assert run_in_virtual_time(run()) == pytest.approx(2.0)


def test_a_shortened_job_ends_earlier_but_not_before_what_it_has_done():
    async def run():
        process = Process(Cores(1))
        job = process.begin(10.0)
        await asyncio.sleep(4.0)
        assert process.passed(job) == pytest.approx(4.0)
        process.shorten(job, 5.0)
        await job.done.wait()
        assert now() == pytest.approx(5.0)
        job = process.begin(10.0)
        await asyncio.sleep(4.0)
        process.shorten(job, 1.0)
        await job.done.wait()
        return now()

    assert run_in_virtual_time(run()) == pytest.approx(9.0)


@given(
    st.floats(0.5, 4),
    st.lists(
        st.tuples(st.floats(0, 5), st.lists(st.floats(0.01, 3), min_size=1, max_size=3)),
        min_size=1,
        max_size=5,
    ),
)
def test_all_seconds_are_done_and_no_core_does_two_at_once(cores, processes):
    async def run():
        shared, made = Cores(cores), []

        async def live(start, jobs):
            process = Process(shared)
            made.append(process)
            await asyncio.sleep(start)
            await asyncio.gather(*(process.work(seconds) for seconds in jobs))
            return now() - start, sum(jobs)

        lives = await asyncio.gather(*(live(*each) for each in processes))
        return lives, sum(process.busy_s for process in made), now()

    lives, busy_s, end = run_in_virtual_time(run())
    total = sum(sum(jobs) for _, jobs in processes)
    assert busy_s == pytest.approx(total, abs=1e-6)
    assert total <= cores * end + 1e-6
    assert all(took >= needed - 1e-6 for took, needed in lives), "a process has one thread"
