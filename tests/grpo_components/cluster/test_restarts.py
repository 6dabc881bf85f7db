"""The budget of restarts: how many, within which time, after which pause."""

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
def test_within_any_window_there_are_never_more_than_allowed(most, waits):
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


def test_a_component_that_is_none_is_never_started_again():
    refused = failure(what="loss: my.Loss returned shape ()", kind="refused")
    with pytest.raises(RoleFailedError) as raised:
        RestartBudget(8, 60, Clock()).spend(refused, repeated=False)
    assert raised.value is refused


def test_without_restarts_a_failure_is_what_it_was():
    first = failure()
    with pytest.raises(RoleFailedError) as raised:
        RestartBudget(0, 60, Clock()).spend(first, repeated=False)
    assert raised.value is first


def test_a_spent_budget_says_which_role_what_how_often_and_where_its_log_is():
    budget = RestartBudget(3, 60, Clock())
    for role in ("generator_0", "reference_0", "generator_0"):
        budget.spend(failure(role), repeated=False)
    with pytest.raises(RoleFailedError) as raised:
        budget.spend(failure(), repeated=False)
    text = str(raised.value)
    assert text.startswith("generator_0 died: killed; 3 restarts in the last 60 s")
    assert "max_restarts" in text and "2 of them were of generator_0" in text
    assert text.endswith("logs/generator_0.log")


def test_what_a_role_raises_again_after_a_restart_ends_the_run_whatever_is_left():
    budget, broken = RestartBudget(9, 60, Clock()), failure(what="failed: KeyError", kind="raised")
    budget.spend(broken, repeated=False)
    with pytest.raises(RoleFailedError, match="failed: KeyError; and the same again"):
        budget.spend(broken, repeated=True)


def test_who_waited_in_vain_for_others_is_not_restarted():
    with pytest.raises(RoleFailedError, match="waited 9 s"):
        RestartBudget(9, 60, Clock()).spend(
            failure(what="waited 9 s", kind="waited"), repeated=False
        )
