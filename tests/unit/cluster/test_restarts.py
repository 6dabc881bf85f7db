"""The restart budget: how many restarts, in which window, after which pause."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_components.cluster.restarts import RestartBudget
from grpo_components.errors import RoleFailedError


def failure(role="generator_0", what="died: killed", kind="died"):
    return RoleFailedError(role, what, f"logs/{role}.log", kind)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@given(st.integers(0, 4), st.lists(st.floats(0.1, 30), max_size=30))
def test_no_window_has_more_restarts_than_allowed(most, waits):
    clock = Clock()
    budget, restarts = RestartBudget(most, 60, clock), []
    for wait in waits:
        clock.now += wait
        try:
            budget.spend(failure(), repeated=False)
        except RoleFailedError:
            assert sum(clock.now - at <= 60 for at in restarts) == most  # and not one too early
        else:
            restarts.append(clock.now)
    for at in restarts:
        assert sum(0 <= at - other <= 60 for other in restarts) <= most


def test_pauses_grow_with_the_restarts_of_the_same_role_only():
    budget = RestartBudget(100, 1e9, Clock())
    pauses = [budget.spend(failure(), repeated=False) for _ in range(7)]
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
    assert budget.spend(failure("reference_0"), repeated=False) == 1


@pytest.mark.parametrize("kind", ["refused", "waited"])
def test_failures_that_a_restart_cannot_help_are_raised(kind):
    """A wrong component stays wrong; a role that waited in vain for others is not at fault."""
    first = failure(what="loss: my.Loss returned shape ()", kind=kind)
    with pytest.raises(RoleFailedError) as raised:
        RestartBudget(8, 60, Clock()).spend(first, repeated=False)
    assert raised.value is first


def test_a_budget_of_0_raises_the_failure_unchanged():
    first = failure()
    with pytest.raises(RoleFailedError) as raised:
        RestartBudget(0, 60, Clock()).spend(first, repeated=False)
    assert raised.value is first


def test_a_spent_budget_names_role_failure_count_and_log():
    budget = RestartBudget(3, 60, Clock())
    for role in ("generator_0", "reference_0", "generator_0"):
        budget.spend(failure(role), repeated=False)
    with pytest.raises(RoleFailedError) as raised:
        budget.spend(failure(), repeated=False)
    first, log = str(raised.value).splitlines()
    assert first.startswith("generator_0 died: killed; ") and "max_restarts" in first
    for fact in ("3 restarts", "60 s", "2 of them of generator_0"):
        assert fact in first
    assert log.endswith("logs/generator_0.log")


def test_a_repeated_error_is_raised_with_budget_left():
    budget, broken = RestartBudget(9, 60, Clock()), failure(what="failed: KeyError", kind="raised")
    budget.spend(broken, repeated=False)
    with pytest.raises(RoleFailedError) as raised:
        budget.spend(broken, repeated=True)
    assert raised.value.what.startswith("failed: KeyError; ")
