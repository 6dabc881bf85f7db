"""Rewards in worker processes: order, errors, runaway samples, and no process left behind."""

import asyncio
import math
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from lib.clusters import new_cluster
from lib.whole_runs import records

from grpo_components.rewards.pool import RewardPool, RewardSpec, Score

POOL = "grpo_components.rewards.pool.RewardPool"
WAIT_S = 60  # for events that are immediate on an idle machine

REWARDS = """
import ctypes
import os
import subprocess
import sys


class Number:
    '''The number in the response, plus `plus`.'''

    max_reward = 3.0

    def __init__(self, plus=0):
        self.plus = plus

    def __call__(self, *, response_text, **sample):
        return int(response_text) + self.plus


class Moody:
    '''Does what the response says.'''

    def __call__(self, *, prompt_text, response_text, answer, finish_reason):
        if response_text == "raise":
            raise KeyError("no luck")
        if response_text == "long":
            raise ValueError("x" * 10_000)
        if response_text in ("nan", "forget"):
            return {"nan": float("nan")}.get(response_text)
        if response_text == "leave":
            sys.exit(4)
        if response_text == "children":
            subprocess.Popen(["sleep", "600"])
            with open(answer, "w") as pipe:  # as for `endless`
                pipe.write("begun")
            ctypes.PyDLL(None).pause()
        if response_text == "exit":
            os._exit(3)
        if response_text == "endless":
            if answer:
                open(answer, "w").close()  # a named pipe: its reader waits until this runs
            ctypes.PyDLL(None).pause()  # holds the interpreter lock, like a huge power
        return 1.0


class Thrifty:
    '''Limits its CPU time; `sleep` only waits, `power` and `endless` compute.'''

    response_cpu_s = 0.2

    def __call__(self, *, prompt_text, response_text, answer, finish_reason):
        if response_text == "sleep":
            ctypes.PyDLL(None).pause()
        if response_text == "power":
            return float(9 ** 9 ** 9 > 1)  # holds the interpreter lock
        while response_text == "endless":
            pass
        return 1.0


class Unborn:
    def __init__(self):
        os._exit(3)


def process():
    return lambda **sample: os.getpid()  # the id of this process


class Leveled:
    '''The column `level` plus the default of a column that no row has.'''

    def __call__(self, *, prompt_text, response_text, answer, finish_reason, level, missing=100):
        return float(level) + missing


class Counted:
    '''The number of columns.'''

    def __call__(self, prompt_text, response_text, answer, finish_reason, **columns):
        return float(len(columns) if columns.get("tags") == ["a", "b"] else -1)


def loaded():
    '''The number of heavy libraries that this process has loaded.'''
    return lambda **sample: len({"torch", "ray", "vllm", "torchtune"} & set(sys.modules))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "some_rewards.py").write_text(REWARDS)
    return folder


@pytest.fixture(autouse=True)
def importable(folder, monkeypatch):
    monkeypatch.syspath_prepend(folder)


@pytest.fixture
def make_pool():
    before = set(psutil.Process().children(recursive=True))
    pools = []

    def make(*, num_workers=1, timeout_s=WAIT_S, **rewards):
        pool = RewardPool(rewards, num_workers=num_workers, timeout_s=timeout_s)
        pools.append(pool)
        return pool

    yield make
    for pool in pools:
        pool.close()
    assert not set(psutil.Process().children(recursive=True)) - before


def reward(name, weight=1.0, is_success=False, **kwargs):
    return RewardSpec(f"some_rewards.{name}", kwargs, weight, is_success)


def maths():
    component = "grpo_components.rewards.maths.MathCorrectness"
    return RewardSpec(component, {"answer_format": "boxed"}, 1.0, True)


def samples(*responses, answer=""):
    return [
        {"prompt_text": "?", "response_text": r, "answer": answer, "finish_reason": "stop"}
        for r in responses
    ]


def test_scores_come_in_order_weighted_and_with_their_terms(make_pool):
    pool = make_pool(
        num_workers=2,
        size=reward("Number", weight=0.5, is_success=True),
        more=reward("Number", weight=2.0, plus=10),
    )
    assert pool(samples("4", "-1", "3")) == [
        Score(0.5 * n + 2.0 * (n + 10), {"size": n, "more": n + 10}, n > 0, None)
        for n in (4, -1, 3)
    ]
    assert pool([]) == []


def test_many_threads_at_once_each_get_their_own_scores_from_all_processes(make_pool):
    pool = make_pool(num_workers=2, size=reward("Number"), process=reward("process", weight=0.0))

    def ask(thread):
        numbers = range(100 * thread, 100 * thread + 50)
        scores = pool(samples(*map(str, numbers)))
        assert [score.reward for score in scores] == list(numbers)
        return {score.terms["process"] for score in scores}

    with ThreadPoolExecutor(8) as threads:
        assert len(set().union(*threads.map(ask, range(8)))) == 2


def line_of(folder, text):
    return f"({folder / 'some_rewards.py'}:{1 + REWARDS.split(text)[0].count(chr(10))})"


def test_a_failed_sample_has_an_error_and_leaves_the_others_alone(make_pool, folder):
    file = folder / "some_rewards.py"
    # What is returned has no traceback: the line of the call.
    own = f" {line_of(folder, 'def __call__(self, *, prompt_text')}"
    problems = {
        "raise": f"reward mood: KeyError {line_of(folder, 'raise KeyError')}: 'no luck'",
        "long": f"reward mood: ValueError {line_of(folder, 'raise ValueError')}: {'x' * 900}",
        "nan": f"reward mood: gave nan{own}",
        "forget": f"reward mood: TypeError{own}: ",
        "leave": f"reward mood: SystemExit {line_of(folder, 'sys.exit(4)')}: 4",
        "exit": "reward mood: its process died",
    }
    pool = make_pool(process=reward("process"), mood=reward("Moody", is_success=True))
    scores = pool(samples("fine", *(r for bad in problems for r in (bad, "fine"))))
    for good in scores[::2]:
        assert good.success and good.error is None
    for bad, problem in zip(scores[1::2], problems.values(), strict=True):
        assert math.isnan(bad.reward)
        assert (bad.terms, bad.success) == ({}, False)
        line, *lines = bad.error.splitlines()
        assert line.startswith(problem) and len(line) < 1200
        # The traceback begins in the user's file: none of our calls, whose order may change.
        assert bool(lines) == (" (" in problem and own not in problem), bad.error
        if lines:
            assert lines[0] == "Traceback (most recent call last):"
            assert lines[1].startswith(f'  File "{file}", line ') and "in __call__" in lines[1]
            assert "grpo_components" not in bad.error.replace(str(file), "")


def test_a_reward_gets_the_columns_that_its_signature_takes(make_pool):
    """By name or all of them; the others need not know of them."""
    pool = make_pool(
        by_name=reward("Leveled"), all_of_them=reward("Counted"), size=reward("Number", weight=0.0)
    )
    columns = {"level": 3, "tags": ["a", "b"], "Problem ID": None}
    (score,) = pool([{**columns, **samples("1")[0]}])
    assert score.terms == {"by_name": 103.0, "all_of_them": 3.0, "size": 1.0}
    (score,) = pool(samples("1"))
    assert "reward by_name: TypeError" in score.error and "'level'" in score.error


def test_processes_that_a_reward_started_die_with_the_pool(make_pool, begun):
    others = set(psutil.Process().children())
    pool = make_pool(mood=reward("Moody"))
    with ThreadPoolExecutor(1) as thread:
        stuck = thread.submit(pool, samples("children", answer=str(begun)))
        assert begun.read_text() == "begun"
        (worker,) = set(psutil.Process().children()) - others
        (child,) = worker.children()
        pool.close()
        assert stuck.result()[0].error == "reward mood: its process died"
    _, alive = psutil.wait_procs([child], timeout=WAIT_S)
    assert not alive


@pytest.mark.parametrize("costly", ["endless", "power"])
def test_a_response_beyond_the_cpu_limit_of_a_reward_scores_0_there(make_pool, costly):
    pool = make_pool(
        thrift=reward("Thrifty", weight=2.0, is_success=True),
        process=reward("process", weight=0.0),
        more=reward("Thrifty"),
    )
    before, runaway, after = pool(samples("fine", costly, "fine"))
    assert (before.reward, before.success) == (after.reward, after.success) == (3.0, True)
    assert (runaway.reward, runaway.success, runaway.error) == (0.0, False, None)
    assert runaway.terms == {**runaway.terms, "thrift": 0.0, "more": 0.0}
    assert before.terms["process"] != runaway.terms["process"] != 0.0


def test_a_reward_that_waits_too_long_is_a_failed_sample(make_pool):
    """Not a score of 0: a busy machine may be the reason."""
    (score,) = make_pool(timeout_s=1, thrift=reward("Thrifty"))(samples("sleep"))
    assert math.isnan(score.reward)
    assert score.error == "reward thrift: TimeoutError: no score after 1 s"


def test_samples_that_hang_a_reward_only_fail_themselves(make_pool):
    pool = make_pool(timeout_s=1, process=reward("process"), mood=reward("Moody"))
    (fine, *hung) = pool(samples("fine", *["endless"] * 3))
    assert fine.error is None
    assert all(score.error.startswith("reward mood: TimeoutError: ") for score in hung)
    assert not psutil.pid_exists(int(fine.terms["process"]))
    (last,) = pool(samples("fine"))
    assert last.terms["process"] != fine.terms["process"]


def test_a_runaway_holds_up_only_its_own_process(make_pool):
    pool = make_pool(num_workers=2, mood=reward("Moody"))
    with ThreadPoolExecutor(1) as thread:
        stuck = thread.submit(pool, samples("endless"))
        for _ in range(5):
            assert pool(samples("fine"))[0].error is None
        assert not stuck.done()
        pool.close()
        assert stuck.result()[0].error == "reward mood: its process died"


def test_closing_at_once_leaves_no_process_and_a_closed_pool_scores_no_more(make_pool):
    for _ in range(5):
        pool = make_pool(num_workers=3, correctness=maths())
        pool.close()
        with pytest.raises(RuntimeError):
            pool(samples("1"))


@pytest.mark.parametrize(
    ("spec", "cause"),
    [
        (reward("Missing"), "AttributeError.*Missing"),
        (RewardSpec("no_such_module.Thing", {}, 1.0, False), "ModuleNotFoundError"),
        (reward("Number", minus=3), "TypeError.*minus"),
        (reward("Unborn"), "broken"),
    ],
)
def test_rewards_that_cannot_be_built_are_an_error_each_time(make_pool, spec, cause):
    pool = make_pool(broken=spec)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=rf"^rewards .*{cause}"):
            pool(samples("1"))


@pytest.fixture
def begun(tmp_path):
    """A named pipe: reading it waits until the endless reward runs."""
    os.mkfifo(tmp_path / "begun")
    return tmp_path / "begun"


@pytest.fixture
def cluster(tmp_path):
    (tmp_path / "logs").mkdir()
    cluster = new_cluster(tmp_path, max_restarts=2)
    cluster.start()
    yield cluster
    cluster.stop()


def test_in_a_ray_actor_the_processes_stay_light_and_die_with_it(cluster, folder, tmp_path, begun):
    rewards = {name: reward(name) for name in ("process", "loaded")}
    rewards |= {"mood": reward("Moody"), "correctness": maths()}
    env = {"PYTHONPATH": os.pathsep.join([str(folder), os.getcwd()])}
    role = cluster.spawn("scorer", POOL, env=env, rewards=rewards, num_workers=1, timeout_s=600)

    async def run():
        await cluster.ready(120)
        given = samples(r"\boxed{7}", r"\boxed{8}", answer="7")
        lanes = [f"thread{i}" for i in range(4)]
        calls = (role.call("__call__", given, timeout_s=120, lane=lane) for lane in lanes)
        return await asyncio.gather(*calls)

    rounds = asyncio.run(run())
    for scores in rounds:
        assert [score.terms["correctness"] for score in scores] == [1.0, 0.0]
        assert [score.terms["loaded"] for score in scores] == [0.0, 0.0]
    worker = psutil.Process(int(rounds[0][0].terms["process"]))
    role.submit("__call__", samples("endless", answer=str(begun)))
    begun.read_text()
    (record,) = records(tmp_path / "logs/roles.jsonl")
    assert worker.ppid() == record["pid"]
    os.kill(record["pid"], signal.SIGKILL)
    _, alive = psutil.wait_procs([worker], timeout=WAIT_S)
    assert not alive
