"""Roles in their own processes: results, failures that name the role, no remains at the end."""

import asyncio
import json
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from grpo_components.cluster.cluster import Cluster
from grpo_components.cluster.restarts import RestartBudget
from grpo_components.errors import RoleFailedError, RoleLostError

STORE = 80 * 10**6
"""Bytes of shared memory, nearly the least that Ray takes."""


class Counter:
    """A role with a blocking, a failing, an endless, and an asynchronous method."""

    def __init__(self, start=0, fails_if_there=None, dies_if_there=None, life=None):
        self.life = life
        if start < 0:
            raise ValueError("start is below 0")
        if fails_if_there and Path(fails_if_there).exists():
            Path(fails_if_there).unlink()
            raise OSError("the node is not ready")
        if dies_if_there and Path(dies_if_there).exists():
            Path(dies_if_there).unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        self.value = start
        self.release = threading.Event()

    def add(self, amount):
        self.value += amount
        return self.value

    def block(self, size, value):
        return np.full(size, value, np.uint8), value

    def total_of(self, block):
        return int(block.sum(dtype=np.int64))

    def wait(self):
        return self.release.wait(30)

    def let_go(self):
        self.release.set()

    def split(self):
        return [self.value], self.value

    def total(self, values):
        return sum(values)

    def fail(self):
        raise KeyError("no such thing")

    def fail_slowly(self):
        time.sleep(1)
        self.fail()

    def nap(self, seconds):
        time.sleep(seconds)
        return self.value

    def fail_once(self, mark):
        if not Path(mark).exists():
            Path(mark).touch()
            self.fail()
        return "done"

    def nap_once(self, mark):
        if not Path(mark).exists():
            Path(mark).touch()
            time.sleep(60)
        return "awake"

    async def sleep(self):
        await asyncio.sleep(60)

    def life_and_pid(self):
        return self.life, os.getpid()

    def identity(self):
        return {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "GREETING")}


@pytest.fixture(scope="module")
def output_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    (folder / "logs").mkdir()
    return folder


@pytest.fixture(scope="module")
def cluster(output_dir):
    path = os.environ.get("PYTHONPATH")
    # The role class of this test lies beside it, and importlib mode puts no folder on the path.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), path]))
    # Other tests of this process leave children of theirs, e.g. multiprocessing's resource tracker.
    not_ours = set(psutil.Process().children(recursive=True))
    cluster = Cluster(output_dir, "WARNING", attempt=0, object_store_memory=STORE)
    cluster.start()
    yield cluster
    children = set(psutil.Process().children(recursive=True)) - not_ours
    cluster.stop()
    if path is not None:
        os.environ["PYTHONPATH"] = path
    assert not [child for child in children if child.is_running() and child.status() != "zombie"]
    assert not cluster.temp_dir.exists()


def spawn(cluster, name, **kwargs):
    role = cluster.spawn(name, "test_cluster.Counter", **kwargs)
    asyncio.run(cluster.ready(120))
    return role


def test_a_role_answers_keeps_its_state_and_is_recorded(cluster, output_dir):
    role = spawn(cluster, "counter", start=3, cpu_threads=1, env={"GREETING": "hello"})

    async def run():
        assert await role.call("add", 4, timeout_s=30) == 7
        assert await role.call("identity", timeout_s=30) == {
            "OMP_NUM_THREADS": "1",
            "GREETING": "hello",
        }
        listed, plain = role.submit("split", num_returns=2)
        assert await role.result(plain, "split", 30) == 7
        assert await role.call("total", listed, timeout_s=30) == 7  # a reference arrives as value

    asyncio.run(run())
    records = [json.loads(line) for line in (output_dir / "logs" / "roles.jsonl").open()]
    record = next(record for record in records if record["role"] == "counter")
    assert psutil.pid_exists(record["pid"])
    assert record["attempt"] == 0
    assert (output_dir / "logs" / "counter.log").exists()


def test_more_than_the_object_store_holds_is_spilled_and_nothing_is_lost(cluster):
    """Also a block that is larger than all of it."""
    role, sizes = spawn(cluster, "full"), [STORE // 3] * 6 + [STORE * 5 // 4]

    async def run():
        blocks = [role.submit("block", size, i, num_returns=2) for i, size in enumerate(sizes)]
        for number, (_, value) in enumerate(blocks):
            assert await role.result(value, "block", 60) == number
        for number, (block, _) in enumerate(blocks):
            total = await role.call("total_of", block, timeout_s=60)
            assert total == number * sizes[number]

    asyncio.run(run())
    spilled = [p for p in cluster.temp_dir.rglob("*") if p.is_file() and p.stat().st_size > 10**7]
    assert spilled


def test_every_process_listens_on_loopback_only(cluster):
    spawn(cluster, "listening")
    sockets = [
        (each.name(), connection.laddr.ip)
        for each in psutil.Process().children(recursive=True)
        for connection in each.net_connections("inet")
        if connection.status == "LISTEN"
    ]
    assert len(sockets) > 3, "Ray listens"
    assert {ip.removeprefix("::ffff:") for _, ip in sockets} == {"127.0.0.1"}, sockets


def test_another_lane_runs_beside_a_blocking_call(cluster):
    role = spawn(cluster, "lanes")

    async def run():
        waiting = role.submit("wait")
        await role.call("let_go", lane="beside", timeout_s=30)
        assert await role.result(waiting, "wait", 30) is True

    asyncio.run(run())


def test_an_error_in_a_role_names_the_role_the_error_and_the_log(cluster):
    role = spawn(cluster, "failing")
    with pytest.raises(
        RoleFailedError, match=r"failing failed: KeyError: 'no such thing'"
    ) as error:
        asyncio.run(role.call("fail", timeout_s=30))
    assert "failing.log" in str(error.value)


def test_an_error_is_named_after_the_role_whose_code_failed_not_after_who_waits_for_it(cluster):
    source, sink = spawn(cluster, "source"), spawn(cluster, "sink")
    with pytest.raises(RoleFailedError, match="source failed: KeyError"):
        asyncio.run(sink.call("total", source.submit("fail"), timeout_s=30))


def test_a_role_that_does_not_answer_in_time_is_named(cluster):
    role = spawn(cluster, "slow")
    with pytest.raises(RoleFailedError, match=r"slow did not answer sleep within 0\.2 s"):
        asyncio.run(role.call("sleep", timeout_s=0.2))


def test_a_role_that_cannot_be_built_is_named(cluster):
    cluster.spawn("broken", "test_cluster.Counter", start=-1)
    with pytest.raises(ExceptionGroup) as group:
        asyncio.run(cluster.ready(120))
    assert "broken failed: ValueError: start is below 0" in str(group.value.exceptions[0])


def pid_of(output_dir, name):
    records = map(json.loads, (output_dir / "logs" / "roles.jsonl").open())
    return [record["pid"] for record in records if record["role"] == name][-1]


def nothing(*_):
    pass


def test_the_death_of_an_idle_role_is_noticed_at_once(cluster, output_dir):
    role = spawn(cluster, "victim")

    async def run():
        watching = asyncio.create_task(role.watch(0.5, 20, nothing))
        await role.call("add", 1, timeout_s=30)
        os.kill(pid_of(output_dir, "victim"), signal.SIGKILL)
        await asyncio.wait_for(watching, 30)

    started = time.monotonic()
    with pytest.raises(RoleFailedError, match="victim died"):
        asyncio.run(run())
    assert time.monotonic() - started < 30


@pytest.fixture
def restarting(cluster, monkeypatch):
    """A cluster whose roles may be restarted, soon; and what is told of it."""
    told = []
    monkeypatch.setattr(cluster, "_budget", RestartBudget(3, 1e9))
    monkeypatch.setattr(cluster, "_note", told.append)
    monkeypatch.setattr("grpo_components.cluster.restarts._FIRST_PAUSE_S", 0.05)
    return cluster, told


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_call_under_way_is_made_again_after_the_role_has_recovered(restarting, output_dir, how):
    """Killed or frozen; and nobody else gets in before it has recovered."""
    cluster, told = restarting
    name = f"restarted_{how.name}"
    role = spawn(cluster, name, start=5)

    async def recover():
        late.append(asyncio.create_task(role.call("add", 1, timeout_s=30)))
        await asyncio.sleep(0.3)
        await role.call("add", 100, timeout_s=30)

    async def run():
        role.recover = recover
        await role.call("add", 1000, timeout_s=30)
        # A death is noticed at once; only silence takes patience.
        patience_s = 2 if how is signal.SIGSTOP else 60
        watching = asyncio.create_task(role.watch(0.2, patience_s, nothing))
        waiting = asyncio.create_task(role.call("nap", 2.0, timeout_s=60))
        once = role.submit("add", 10_000, once=True)  # behind the nap
        await asyncio.sleep(0.5)
        os.kill(pid_of(output_dir, name), how)
        assert await waiting == 105  # as it was built, and recovered; the 1000 are forgotten
        assert await late[0] == 106
        assert await role.result(once, "add", 30) is None  # its recovery did what it was for
        assert await role.result(role.submit("add", 0, once=True), "add", 30) == 106
        watching.cancel()

    late = []
    asyncio.run(run())
    assert told[0].startswith(f"{name} died" if how is signal.SIGKILL else f"{name} gave no sign")
    assert "restart 1 of at most 3" in told[0] and told[1].startswith(f"{name} is back")


def test_what_a_role_returned_outlives_it_and_its_last_call_of_a_kind_is_made_again(
    restarting, output_dir
):
    cluster, _ = restarting
    role, sink = spawn(cluster, "source_2", start=7, remembers="add"), spawn(cluster, "sink_2")

    async def run():
        listed, plain = role.submit("split", num_returns=2)
        assert await role.result(plain, "split", 30) == 7
        await role.call("add", 1, timeout_s=30)
        await role.call("add", 5, timeout_s=30)
        os.kill(pid_of(output_dir, "source_2"), signal.SIGKILL)
        assert await role.call("add", 20, timeout_s=60) == 7 + 5 + 20
        assert await sink.call("total", listed, timeout_s=30) == 7
        assert await sink.answer(listed, "a list", 30) == [7]  # whoever asks for it

    asyncio.run(run())


@pytest.mark.parametrize("alone", [True, False])
def test_a_process_that_ends_before_its_role_is_built_is_started_again(restarting, tmp_path, alone):
    """In the same attempt: nothing was trained yet."""
    cluster, told = restarting
    cluster._together.clear()
    mark, attempt = tmp_path / "mark", cluster._attempt
    mark.touch()
    other = cluster.spawn(f"waits_{alone}", "test_cluster.Counter", restarts_alone=alone)
    role = spawn(
        cluster, f"newborn_{alone}", start=3, dies_if_there=str(mark), restarts_alone=alone
    )
    assert asyncio.run(role.call("add", 1, timeout_s=30)) == 4
    assert asyncio.run(other.call("add", 1, timeout_s=30)) == 1
    assert told[0].startswith(f"newborn_{alone} died") and "back after" in told[1]
    assert "attempt" not in told[0] and cluster._attempt == attempt


def test_a_result_whose_turn_has_not_come_is_lost_with_the_life_that_gave_it(
    restarting, output_dir
):
    cluster, told = restarting
    role = spawn(cluster, "replayed", numbered_lives=True)
    first = pid_of(output_dir, "replayed")

    async def run():
        turn = asyncio.Event()
        options = {"timeout_s": 60, "turn": turn.wait}
        waiting = asyncio.create_task(role.call("life_and_pid", **options))
        await role.call("add", 1, timeout_s=30)  # behind it in its lane
        assert not waiting.done()
        await role.restart_as("died: long ago")
        assert not waiting.done()
        turn.set()
        life, pid = await waiting
        assert life == 1 and pid == pid_of(output_dir, "replayed") != first

        async def fails():
            raise TimeoutError("the replay stands still")

        with pytest.raises(TimeoutError, match="stands still"):
            await role.call("life_and_pid", timeout_s=60, turn=fails)

    asyncio.run(run())
    assert told[0].startswith("replayed died: long ago; starting it again")


def test_what_a_role_raises_twice_ends_the_run(restarting):
    cluster, told = restarting
    role = spawn(cluster, "broken_for_good")
    with pytest.raises(RoleFailedError, match="KeyError: 'no such thing'; and the same again"):
        asyncio.run(role.call("fail", timeout_s=30))
    assert len(told) == 2


def test_what_calls_of_one_method_raise_in_turn_ends_the_run(restarting):
    """Each of them alone fails once only: the other has ended its process before."""
    cluster, told = restarting
    role = spawn(cluster, "broken_for_all")

    async def run():
        calls = [role.call("fail_slowly", timeout_s=60, lane=lane) for lane in ("main", "beside")]
        await asyncio.gather(*calls)

    with pytest.raises(RoleFailedError, match="KeyError: 'no such thing'; and the same again"):
        asyncio.run(run())
    assert len(told) == 2


def test_the_same_error_after_an_answer_is_another_one(restarting, tmp_path):
    cluster, told = restarting
    role = spawn(cluster, "unlucky")

    async def run():
        for number in range(2):
            mark = str(tmp_path / f"{number}")
            assert await role.call("fail_once", mark, timeout_s=60) == "done"

    asyncio.run(run())
    assert sum("starting it again" in line for line in told) == 2


def test_a_silent_call_restarts_its_role_and_writes_down_who_waits_where(restarting, output_dir):
    cluster, told = restarting
    role = spawn(cluster, "hung")

    async def run():
        slow = asyncio.create_task(role.call("nap_once", str(output_dir / "was_here"), timeout_s=2))
        assert await slow == "awake"

    asyncio.run(run())
    assert told[0].startswith("hung did not answer nap_once within 2 s")
    assert "nap_once" in (output_dir / "logs" / "hung.log").read_text()  # its threads' stacks
    assert "await slow" in (output_dir / "logs" / "driver_stacks.log").read_text()


def test_one_of_a_family_is_given_up_where_enough_are_left(restarting):
    cluster, told = restarting
    one, other = (spawn(cluster, f"worker_{i}", min_living=1) for i in range(2))

    async def run():
        with pytest.raises(RoleLostError):
            await one.call("fail", timeout_s=30)
        with pytest.raises(RoleLostError):  # and nobody waits for it again
            await one.call("add", 1, timeout_s=30)
        await one.watch(0.1, 1, nothing)
        assert await other.call("add", 1, timeout_s=30) == 1
        with pytest.raises(RoleFailedError, match="worker_1 failed"):  # the last one is needed
            await other.call("fail", timeout_s=30)

    asyncio.run(run())
    assert "worker_0 is given up" in told[2]


def test_roles_that_fail_together_begin_again_together_and_the_loops_with_them(
    restarting, output_dir
):
    """The cause is the one that died, not the one that waited for it."""
    cluster, told = restarting
    cluster.roles.clear()  # of the tests before; this test's are supervised
    ranks = [spawn(cluster, f"rank_{i}", restarts_alone=False) for i in range(2)]
    alone = spawn(cluster, "alone", start=40)
    attempts, began_again = [], []

    async def loops():
        attempts.append([await rank.call("add", 1, timeout_s=30) for rank in ranks])
        assert await alone.call("add", 1, timeout_s=30) == 40 + len(attempts)
        if len(attempts) == 1:
            os.kill(pid_of(output_dir, "rank_1"), signal.SIGKILL)
            await asyncio.sleep(0.5)
            await ranks[0].call("fail", timeout_s=30)

    async def begin_again():
        began_again.append(len(attempts))

    asyncio.run(cluster.supervise(loops, begin_again))
    assert attempts == [[1, 1], [1, 1]] and began_again == [1]
    assert told[0].startswith("rank_1 died") and "as attempt 1" in told[0]


def test_a_start_that_fails_on_the_way_back_is_tried_again_in_the_same_attempt(
    restarting, output_dir, tmp_path
):
    cluster, told = restarting
    cluster.roles.clear()
    cluster._together.clear()
    before, mark = cluster._attempt, tmp_path / "not_ready"
    rank = spawn(cluster, "unlucky_rank", restarts_alone=False, fails_if_there=str(mark))
    began_again = []

    async def loops():
        await rank.call("add", 1, timeout_s=30)
        if not began_again:
            mark.touch()
            os.kill(pid_of(output_dir, "unlucky_rank"), signal.SIGKILL)
            await rank.call("nap", 60, timeout_s=90)

    async def begin_again():
        began_again.append(cluster._attempt)

    asyncio.run(cluster.supervise(loops, begin_again))
    assert began_again == [before + 1]
    assert all(f"as attempt {before + 1}" in line for line in told[:2])
    assert "the node is not ready" in told[1] and "are back" in told[2]
