"""Roles in their own processes: results, named failures, restarts, and a clean end."""

import asyncio
import json
import os
import signal
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import ray
from lib.clusters import new_cluster
from lib.counter_role import GpusWhenUnpickled

from grpo_components.cluster import role as role_module
from grpo_components.cluster.ray_cluster import RayCluster
from grpo_components.cluster.role import RestartBudget
from grpo_components.cluster.supervision import exit_code
from grpo_components.errors import RoleFailedError, RoleLostError
from grpo_components.exchange.ledger import Ledger

pytestmark = pytest.mark.anyio

COUNTER = "lib.counter_role.Counter"
STORE = 80 * 10**6
"""Bytes of shared memory, nearly the least that Ray takes."""
ENDING = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


class Budget:
    """A restart budget that each test sets, with short pauses."""

    def __init__(self):
        self.allow(0)

    def allow(self, restarts):
        self.budget = RestartBudget(restarts, 1e9)

    def spend(self, failure, **how):
        return min(self.budget.spend(failure, **how), 0.05)

    def used(self):
        return self.budget.used()


@pytest.fixture(scope="module")
def output_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    (folder / "logs").mkdir()
    return folder


@pytest.fixture(scope="module")
def budget():
    return Budget()


@pytest.fixture(scope="module")
def all_notes():
    """What the cluster says when it starts roles the first time, and what else it says."""
    return SimpleNamespace(starts=[], others=[])


@pytest.fixture(scope="module")
def processes():
    """Returns the descendants of this process, without those left by other tests."""
    others = set(psutil.Process().children(recursive=True))
    return lambda: set(psutil.Process().children(recursive=True)) - others


@pytest.fixture(scope="module")
def cluster(output_dir, budget, all_notes, processes):
    def note(line):
        at_start = line.startswith("starting ") or " is ready after " in line
        (all_notes.starts if at_start else all_notes.others).append(line)

    cluster = new_cluster(output_dir, note, object_store_memory=STORE)
    cluster._budget = budget
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[2])  # has the role's class; roles inherit it
        patch.setattr(ray, "init", partial(ray.init, num_gpus=4))  # Ray believes it
        cluster.start()
        yield cluster
    ours = processes()
    cluster.stop()
    assert not [child for child in ours if child.is_running() and child.status() != "zombie"]
    assert not cluster.scratch.exists()


@pytest.fixture(autouse=True)
def notes(cluster, budget, all_notes):
    """Notes of the cluster during a test, which allows its restarts, and supervises its roles."""
    cluster.roles.clear()
    budget.allow(0)
    all_notes.starts.clear()
    all_notes.others.clear()
    return all_notes.others


async def spawn(cluster, *names, **kwargs):
    """Start roles in parallel; returns a list, or the role if there is one name."""
    roles = [cluster.spawn(name, COUNTER, **kwargs) for name in names]
    await cluster.ready(120)
    return roles if len(roles) > 1 else roles[0]


@pytest.fixture(scope="module")
def pair(cluster):
    """Two roles for the tests that end no process."""
    return asyncio.run(spawn(cluster, "first", "second"))


def starts_of(role, output_dir):
    records = map(json.loads, (output_dir / "logs" / "roles.jsonl").open())
    return [record for record in records if record["role"] == role.name]


def nothing(*_):
    pass


async def nothing_to_do(*_):
    pass


async def test_a_role_answers_keeps_its_state_and_is_recorded(cluster, output_dir, all_notes):
    role = await spawn(cluster, "counter", start=3, cpu_threads=1, env={"GREETING": "hello"})
    assert await role.call("add", 4, timeout_s=30) == 7
    environment = {"OMP_NUM_THREADS": "1", "GREETING": "hello"}
    assert await role.call("environment", timeout_s=30) == environment
    (listed, _), plain = await role.call("split", num_returns=2, timeout_s=30)
    assert plain == 7
    assert await role.call("total", listed, timeout_s=30) == 7  # a part arrives as its value
    starting, ready = all_notes.starts
    assert starting == "starting counter ..." and ready.startswith("counter is ready after ")
    (record,) = starts_of(role, output_dir)
    assert (record["pid"], record["attempt"]) == (role.process.pid, 0)
    assert psutil.pid_exists(role.process.pid)
    assert (output_dir / "logs" / "counter.log").exists()


async def test_a_full_object_store_spills_to_disk_and_loses_nothing(cluster, pair):
    """Even a block that is larger than the store."""
    role, sizes = pair[0], [STORE // 3] * 4 + [STORE * 5 // 4]
    blocks = [role.submit("block", size, i, num_returns=2) for i, size in enumerate(sizes)]
    for number, (_, value) in enumerate(blocks):
        assert await role.answer(value, "block", 60) == number
    for number, (block, _) in enumerate(blocks):
        total = await role.call("total_of", block, timeout_s=60)
        assert total == number * sizes[number]
    files = [path for path in cluster.scratch.rglob("*") if path.is_file()]
    assert any(path.stat().st_size > 10**7 for path in files)  # while the blocks live


async def test_an_error_names_the_role_whose_code_failed_and_its_log(pair):
    """The role whose code failed, not the one that waited for the result."""
    first, second = pair
    for call in (
        lambda: first.call("fail", timeout_s=30),
        lambda: second.call("total", first.submit("fail"), timeout_s=30),
    ):
        with pytest.raises(RoleFailedError) as failed:
            await call()
        assert (failed.value.role, failed.value.kind) == ("first", "raised")
        assert "KeyError: 'no such thing'" in failed.value.what
        assert "first.log" in str(failed.value)


async def failed_start(cluster):
    with pytest.raises(ExceptionGroup) as group:
        await cluster.ready(120)
    (failure,) = group.value.exceptions
    return failure


async def test_a_role_that_cannot_be_built_is_named(cluster):
    cluster.spawn("broken", COUNTER, start=-1)
    failure = await failed_start(cluster)
    assert failure.role == "broken" and "ValueError: start is below 0" in failure.what


async def test_a_start_ends_when_the_nodes_that_live_have_no_room_any_more(cluster, monkeypatch):
    monkeypatch.setattr(role_module, "_ROOM_CHECK_S", 0.1)
    answers = iter(["", "", "the 1 nodes that live have no room for it (5 CPU)"])
    monkeypatch.setattr(RayCluster, "why_no_room", lambda *_: next(answers))
    role = cluster.spawn("late", COUNTER, start_after_s=60)
    failure = await failed_start(cluster)
    assert failure.what == "cannot start; the 1 nodes that live have no room for it (5 CPU)"
    role.process.kill()


async def test_the_death_of_an_idle_role_is_noticed_at_once(cluster):
    role = await spawn(cluster, "victim")
    watching = asyncio.create_task(role.watch(0.2, 600, nothing))  # silence takes longer
    await role.call("add", 1, timeout_s=30)
    os.kill(role.process.pid, signal.SIGKILL)
    with pytest.raises(RoleFailedError) as failed:
        await asyncio.wait_for(watching, 60)
    assert (failed.value.role, failed.value.kind) == ("victim", "died")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_pending_call_is_repeated_after_the_role_has_recovered(
    cluster, budget, notes, tmp_path, monkeypatch, how
):
    """Killed or frozen; other calls wait until it has recovered."""
    budget.allow(3)
    role = await spawn(cluster, f"restarted_{how.name}", start=5)

    async def recover(name):
        late.append(asyncio.create_task(role.call("add", 1, timeout_s=30)))
        await asyncio.sleep(0)  # the late call is made, and must wait
        for watching in watches:
            watching.cancel()
        await role.call("add", 100, timeout_s=30)

    late, watches = [], []
    monkeypatch.setattr(cluster, "_recover", recover)
    await role.call("add", 1000, timeout_s=30)
    waiting = asyncio.create_task(role.call("hang_once", str(tmp_path / "mark"), timeout_s=200))
    assert await role.call("wait_until_it_hangs", lane="beside", timeout_s=60)
    # Waits for it in the same lane. Sent before it hangs, Ray may run it first.
    once = asyncio.create_task(role.call_once("add", 10_000, timeout_s=200))
    await asyncio.sleep(0)  # it is sent
    os.kill(role.process.pid, how)
    # A death is noticed at once; only silence takes patience.
    patience_s = 1 if how is signal.SIGSTOP else 600
    watches.append(asyncio.create_task(role.watch(0.2, patience_s, nothing)))
    assert await waiting in (105, 106)  # before or after the late call
    assert await late[0] == 106  # 5 from its start, 100 from recovery; the 1000 are lost
    assert await once is None  # recovery did its work
    assert await role.call_once("add", 0, timeout_s=30) == 106
    what, back = notes
    assert what.startswith(role.name) and ("heartbeat" in what) == (how is signal.SIGSTOP)
    assert "restart 1 of at most 3" in what and back.startswith(f"{role.name} is back")


async def test_results_outlive_their_process_and_a_process_knows_its_number(cluster, budget, pair):
    budget.allow(3)
    role, sink = await spawn(cluster, "source", start=7, counts_restarts=True), pair[1]
    (listed, _), _ = await role.call("split", num_returns=2, timeout_s=30)
    first = role.process.pid
    os.kill(first, signal.SIGKILL)
    number, pid = await role.call("incarnation_and_pid", timeout_s=60)
    assert number == 1 and pid == role.process.pid != first
    assert await sink.call("total", listed, timeout_s=30) == 7
    assert await sink.answer(listed, "a list", 30) == [7]  # any role can get it


@pytest.mark.parametrize("alone", [True, False])
async def test_a_process_that_dies_before_its_role_is_built_is_restarted(
    cluster, budget, notes, output_dir, tmp_path, alone
):
    """In the same attempt: nothing was trained yet."""
    budget.allow(3)
    mark, options = tmp_path / "mark", {"restarts_alone": alone}
    mark.touch()
    other = cluster.spawn(f"waits_{alone}", COUNTER, **options)
    role = await spawn(cluster, f"newborn_{alone}", start=3, dies_if_there=str(mark), **options)
    assert await role.call("add", 1, timeout_s=30) == 4
    assert await other.call("add", 1, timeout_s=30) == 1
    what, back = notes
    assert what.startswith(f"newborn_{alone} died") and "back after" in back
    assert "attempt" not in what and starts_of(role, output_dir)[-1]["attempt"] == 0


async def test_a_hung_call_restarts_its_role_and_dumps_stacks(
    cluster, budget, notes, output_dir, tmp_path
):
    budget.allow(99)
    role = await spawn(cluster, "hung")

    async def waits():
        slow = asyncio.create_task(role.call("hang_once", str(tmp_path / "mark"), timeout_s=2))
        assert await slow == 0

    await asyncio.create_task(waits())  # of which the driver's stacks tell
    assert notes[0].startswith("hung ") and "hang_once" in notes[0] and "2 s" in notes[0]
    assert "hang_once" in (output_dir / "logs" / "hung.log").read_text()  # its threads' stacks
    assert "await slow" in (output_dir / "logs" / "driver_stacks.log").read_text()


async def test_a_role_is_given_up_if_enough_of_its_family_are_left(cluster, notes):
    one, other = await spawn(cluster, "worker_0", "worker_1", min_living=1)
    for method in ("fail", "split"):  # the second call fails at once
        with pytest.raises(RoleLostError):
            await one.call(method, timeout_s=30)
    await one.watch(0.1, 1, nothing)
    assert await other.call("add", 1, timeout_s=30) == 1
    with pytest.raises(RoleFailedError) as failed:  # the last one is needed
        await other.call("fail", timeout_s=30)
    assert failed.value.role == "worker_1"
    assert "worker_0 is given up" in notes[0]


async def test_a_generator_has_the_gpus_of_its_trainers_and_reserves_none(cluster, budget):
    budget.allow(1)
    names, together = [f"trainer_{n}" for n in range(4)], {"restarts_alone": False}
    trainers = [cluster.spawn(name, COUNTER, num_gpus=1, **together) for name in names]
    given = {"num_gpus": 2, "first_gpus": GpusWhenUnpickled()}  # an argument that starts CUDA
    generators = [
        cluster.spawn(f"generator_{n}", COUNTER, beside=names[2 * n : 2 * n + 2], **given)
        for n in range(2)
    ]
    await cluster.ready(90)
    gpus = [await role.call("gpus", timeout_s=9) for role in trainers]
    assert sorted(gpus) == ["0", "1", "2", "3"], "all of them, one each"
    shared = [f"{gpus[0]},{gpus[1]}", f"{gpus[2]},{gpus[3]}"]
    for method in ("gpus", "gpus_when_unpickled"):
        assert [await role.call(method, timeout_s=9) for role in generators] == shared
    os.kill(generators[1].process.pid, signal.SIGKILL)
    found = await generators[1].call("gpus_when_unpickled", timeout_s=60)
    assert found == shared[1], "also after a restart"
    for role in (*trainers, *generators):
        role.process.kill()


@pytest.mark.parametrize("dead", [[1], [0, 1]])
async def test_roles_that_depend_on_each_other_restart_together_with_the_loops(
    cluster, budget, notes, output_dir, dead
):
    """The cause is the one that died, not the one that waited for it."""
    budget.allow(3)
    ranks = await spawn(cluster, *(f"rank_{n}_of_{dead}" for n in (0, 1)), restarts_alone=False)
    alone = await spawn(cluster, f"alone_{dead}", start=40)
    attempts, began_again = [], []

    async def loops():
        attempts.append([await rank.call("add", 1, timeout_s=30) for rank in ranks])
        assert await alone.call("add", 1, timeout_s=30) == 40 + len(attempts)
        if len(attempts) == 1:
            for number in dead:
                os.kill(ranks[number].process.pid, signal.SIGKILL)
            await ranks[0].call("fail", timeout_s=30)

    async def begin_again():
        began_again.append(len(attempts))

    await cluster.supervise(loops, begin_again, nothing_to_do)
    assert attempts == [[1, 1], [1, 1]] and began_again == [1]
    before, after = (start["attempt"] for start in starts_of(ranks[0], output_dir))
    assert after == before + 1
    assert f"as attempt {after}" in notes[0]
    assert [f"{rank.name} died" in notes[0] for rank in ranks] == [0 in dead, True]


@pytest.mark.parametrize("when", ["before", "while it starts", "never"])
async def test_a_role_that_dies_while_others_restart_comes_back_with_a_line(
    cluster, budget, notes, output_dir, tmp_path, when
):
    """Nobody watches the roles then; a role that is only replaced by a fresh one is no news."""
    budget.allow(3)
    mark = tmp_path / "mark"
    rank = await spawn(cluster, f"rank_of_{when}", restarts_alone=False)
    name = f"buffer_{when}".replace(" ", "_")
    buffer = await spawn(cluster, name, dies_if_there=str(mark))
    refilled, began_again = [], []

    async def recover(name):
        refilled.append(await buffer.call("add", 0, timeout_s=30))

    async def loops():
        await buffer.call("add", 5, timeout_s=30)
        if not began_again:
            os.kill(rank.process.pid, signal.SIGKILL)
            await rank.call("add", 1, timeout_s=90)

    async def begin_again():  # the ranks are back
        began_again.append(buffer.process.pid)
        if when == "before":
            os.kill(buffer.process.pid, signal.SIGKILL)
        elif when == "while it starts":
            mark.touch()
        await buffer.begin_again()
        assert await buffer.call("add", 1, timeout_s=30) == 1, "it is empty, as after any roll-back"

    await cluster.supervise(loops, begin_again, recover)
    told = [line for line in notes if line.startswith("buffer_")]
    if when == "never":
        assert told == [] and refilled == []
    else:
        died, back = told
        assert died.startswith(f"{buffer.name} died") and "restart 2 of at most 3" in died
        assert back.startswith(f"{buffer.name} is back after ") and refilled == [0]
    assert buffer.process.pid != began_again[0]


async def test_a_generator_that_dies_with_its_trainer_in_a_cluster_starts_once_that_is_back(
    cluster, budget, notes, monkeypatch
):
    """Only then are the GPUs known that they share."""
    budget.allow(5)
    monkeypatch.setattr(cluster, "_joined", True)
    trainer = cluster.spawn("trainer_0", COUNTER, num_gpus=1, restarts_alone=False)
    generator = cluster.spawn("generator_0", COUNTER, beside=["trainer_0"])
    await cluster.ready(90)
    found = []

    async def loops():
        if not found:
            found.append("")
            for role in (trainer, generator):
                os.kill(role.process.pid, signal.SIGKILL)
            calls = (role.call("gpus", timeout_s=60) for role in (generator, trainer))
            await asyncio.gather(*calls)
        found.extend([await role.call("gpus", timeout_s=60) for role in (trainer, generator)])

    await cluster.supervise(loops, nothing_to_do, nothing_to_do)
    assert found[1] == found[2] and not any("\n" in line for line in notes)
    for role in (trainer, generator):
        role.process.kill()


async def test_the_same_error_of_a_rank_ends_the_run_unless_a_later_step_was_done(
    cluster, budget, notes, monkeypatch
):
    budget.allow(9)
    rank = await spawn(cluster, "rank_in_error", restarts_alone=False)
    steps = iter([3, 4, 4])
    steps_done = property(lambda ledger: next(steps))
    monkeypatch.setattr(Ledger, "steps_done", steps_done, raising=False)
    fails = partial(rank.call, "fail", timeout_s=30)
    with pytest.raises(RoleFailedError, match="KeyError: 'no such thing'; failed the same way"):
        await cluster.supervise(fails, nothing_to_do, nothing_to_do)
    assert sum("restarting all trainers" in line for line in notes) == 2


async def test_a_complete_run_ends_well_although_a_role_died_but_not_without_its_trainers(
    cluster, notes
):
    """The restart may be under way when the last step ends; a trainer's close writes a profile."""
    role, _ = await spawn(cluster, "last_died", "last_lives")
    role.process.kill()
    await cluster.close_roles(30)
    (line,) = notes
    assert line.startswith("last_died died") and line.endswith("the run is complete")
    rank = await spawn(cluster, "last_rank", restarts_alone=False)
    rank.process.kill()
    with pytest.raises(ExceptionGroup):
        await cluster.close_roles(30)


async def test_ctrl_c_ends_the_run_even_if_a_role_dies_at_the_same_moment(cluster, budget, notes):
    """A closed terminal ends them together; the run must not begin to restart them."""
    budget.allow(3)
    rank = await spawn(cluster, "hung_up", restarts_alone=False)

    async def loops():
        running.cancel()
        raise ExceptionGroup("", [RoleFailedError(rank.name, "died", "a.log", "died")])

    running = asyncio.create_task(cluster.supervise(loops, loops, nothing_to_do))
    await asyncio.wait([running])
    assert running.cancelled() and notes == []


async def test_a_failed_restart_is_repeated_in_the_same_attempt(
    cluster, budget, notes, output_dir, tmp_path
):
    budget.allow(3)
    mark = tmp_path / "not_ready"
    rank = await spawn(cluster, "unlucky_rank", restarts_alone=False, fails_if_there=str(mark))
    began_again = []

    async def loops():
        await rank.call("add", 1, timeout_s=30)
        if not began_again:
            mark.touch()
            os.kill(rank.process.pid, signal.SIGKILL)
            await rank.call("add", 1, timeout_s=90)

    async def begin_again():
        began_again.append(True)

    await cluster.supervise(loops, begin_again, nothing_to_do)
    before, after = (start["attempt"] for start in starts_of(rank, output_dir))
    assert began_again == [True] and after == before + 1
    first, again, back = notes
    assert f"as attempt {after}" in first and f"as attempt {after}" in again
    assert "the node is not ready" in again and "are back" in back


def test_sigterm_while_ray_starts_ends_the_run_like_any_other(output_dir, monkeypatch, capsys):
    """Ray sets a handler of its own wherever it may: in the main thread."""

    def init(**_):
        assert threading.current_thread() is not threading.main_thread()
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("ray.init", init)
    monkeypatch.setattr("sys.argv", ["recipe"])
    own = new_cluster(output_dir)
    before = {number: signal.getsignal(number) for number in ENDING}
    try:
        assert exit_code(own.start) == 143
    finally:
        own.stop()
        for number, handler in before.items():
            signal.signal(number, handler)
    assert capsys.readouterr().err == "terminated: all roles stopped\n"
