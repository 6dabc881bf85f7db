"""When a role is restarted and its calls are repeated, the budget, and the words for a death."""

import asyncio
import itertools
from inspect import signature

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lib.clusters import new_cluster
from lib.role import AtOnce, StandInHost, stand_in_role
from ray.exceptions import OutOfMemoryError

from grpo_components.cluster.role import RestartBudget, role_failure
from grpo_components.cluster.role_host import RoleHost
from grpo_components.cluster.supervision import root_cause
from grpo_components.errors import RoleFailedError


def failure(role="generator_0", what="died: killed", kind="died"):
    return RoleFailedError(role, what, f"logs/{role}.log", kind)


@given(st.integers(0, 4), st.lists(st.floats(0.1, 30), max_size=30))
def test_no_window_has_more_restarts_than_allowed(most, waits):
    now, restarts = 0.0, []
    budget = RestartBudget(most, 60, lambda: now)
    for wait in waits:
        now += wait
        try:
            budget.spend(failure(), repeated=False)
        except RoleFailedError:
            assert sum(now - at <= 60 for at in restarts) == most  # and not one too early
        else:
            restarts.append(now)
    for at in restarts:
        assert sum(0 <= at - other <= 60 for other in restarts) <= most


def test_pauses_grow_with_the_restarts_of_the_same_role_only():
    budget = RestartBudget(100, 1e9, lambda: 0.0)
    pauses = [budget.spend(failure(), repeated=False) for _ in range(7)]
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
    assert budget.spend(failure("reference_0"), repeated=False) == 1


@pytest.mark.parametrize(("kind", "most"), [("refused", 8), ("waited", 8), ("died", 0)])
def test_failures_that_a_restart_cannot_help_are_raised_unchanged(kind, most):
    """A wrong component stays wrong; a role that waited in vain for others is not at fault."""
    first = failure(what="loss: my.Loss returned shape ()", kind=kind)
    with pytest.raises(RoleFailedError) as raised:
        RestartBudget(most, 60, lambda: 0.0).spend(first, repeated=False)
    assert raised.value is first


def test_a_spent_budget_names_role_failure_count_and_log():
    budget = RestartBudget(3, 60, lambda: 0.0)
    for role in ("generator_0", "reference_0", "generator_0"):
        budget.spend(failure(role), repeated=False)
    with pytest.raises(RoleFailedError) as raised:
        budget.spend(failure(), repeated=False)
    first, log = str(raised.value).splitlines()
    assert first.startswith("generator_0 died: killed; ") and "max_restarts" in first
    for fact in ("3 restarts", "60 s", "2 of them of generator_0"):
        assert fact in first
    assert log.endswith("logs/generator_0.log")


class Broken:
    """Fails in each process, in one of them, or at the first call with a mark."""

    def __init__(self, life, marks):
        self.life, self._marks = life, marks

    def fail(self):
        raise KeyError("no such thing")

    async def fail_in(self, life):
        if life != self.life:
            await asyncio.Event().wait()
        self.fail()

    def fail_once(self, mark):
        if mark not in self._marks:
            self._marks.add(mark)
            self.fail()
        return "done"

    def which(self):
        return self.life


def broken_role():
    """A role, and what is noted of it."""
    notes, lives, marks = [], itertools.count(), set()
    return stand_in_role("a", lambda: Broken(next(lives), marks), note=notes.append), notes


@pytest.mark.anyio
@pytest.mark.parametrize("calls", [[("fail",)], [("fail_in", 0), ("fail_in", 1)]])
async def test_the_same_error_of_a_method_twice_ends_the_run(calls):
    """Even if two calls fail, each of them once."""
    role, notes = broken_role()
    with pytest.raises(RoleFailedError, match="KeyError: 'no such thing'; failed the same way"):
        await asyncio.gather(*(role.call(*call, timeout_s=9) for call in calls))
    assert len(notes) == 2, "one restart, and its end"


@pytest.mark.anyio
async def test_the_same_error_after_a_success_is_a_new_error():
    role, notes = broken_role()
    assert [await role.call("fail_once", n, timeout_s=9) for n in range(2)] == ["done"] * 2
    assert sum("restart" in line for line in notes) == 2


@pytest.mark.anyio
async def test_lost_data_ends_a_run_without_roles_that_restart_together(tmp_path):
    """As one without a trainer, whose loops cannot begin again."""
    (tmp_path / "logs").mkdir()
    cluster, lost = new_cluster(tmp_path), failure(kind="lost")
    cluster._restart_together = lambda *_: pytest.fail("restarted")

    async def loops():
        raise lost

    with pytest.raises(ExceptionGroup) as ended:
        await cluster.supervise(loops, loops, loops)
    assert root_cause(ended.value) is lost


@pytest.mark.anyio
async def test_a_restart_discards_a_result_whose_turn_in_a_replay_has_not_come():
    role, notes = broken_role()
    turn = asyncio.Event()
    waiting = asyncio.create_task(role.call("which", timeout_s=9, turn=turn.wait))
    assert await role.call("which", timeout_s=9) == 0 and not waiting.done()
    await role.replay_restart("died: long ago")
    await role.call("which", timeout_s=9)
    assert not waiting.done() and notes[0].startswith("a died: long ago; ")
    turn.set()
    assert await waiting == 1

    async def fails():
        raise TimeoutError("the replay stands still")

    with pytest.raises(TimeoutError, match="stands still"):
        await role.call("which", timeout_s=9, turn=fails)


OUT_OF_MEMORY = """Task was killed due to the node running low on memory.
Memory on the node (IP: 127.0.0.1, ID: 899bf4) was 22.65GB used / 23.54GB limit (0.962363)
Object store memory usage: [- objects spillable: 1 - bytes spillable: 8006451]
Top 10 memory users: PID MEM(GB) COMMAND 31908 15.90 a neighbour"""


@pytest.mark.parametrize(
    ("text", "figures"), [(OUT_OF_MEMORY, ["22.65GB", "23.54GB"]), ("other words", [])]
)
def test_out_of_memory_is_one_short_line_and_not_an_error_of_the_code(text, figures):
    error = OutOfMemoryError(text)
    failure = role_failure(error, "generator_0", "generate_group", "generator_0.log", {})
    assert (failure.role, failure.kind) == ("generator_0", "died")
    assert "memory was full" in failure.what and "\n" not in failure.what
    assert all(figure in failure.what for figure in figures)
    assert len(failure.what) < 100


def test_methods_of_the_stand_in_have_the_parameters_of_the_real_ones():
    host = StandInHost(AtOnce(), "role", object)
    for name, remote in (
        ("call", host.call.options(num_returns=2).remote),
        ("heartbeat", host.heartbeat.remote),
    ):
        _, *real = signature(getattr(RoleHost, name)).parameters.values()
        assert [(p.name, p.kind) for p in signature(remote).parameters.values()] == [
            (p.name, p.kind)
            for p in real
            if not p.name.startswith("_ray")  # of tracing; added when it is made an actor
        ]
