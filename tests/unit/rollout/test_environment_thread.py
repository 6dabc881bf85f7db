"""An environment runs in one thread, has a deadline, and is closed in the end."""

import asyncio
import threading

import pytest

from grpo_components.rollout.environment_thread import EnvironmentThread, TimeLimit


def call(thread, limit, function, *args):
    return asyncio.run(thread.run(limit, function, *args))


def test_one_thread_makes_all_calls_and_it_is_not_the_callers():
    thread, limit = EnvironmentThread(), TimeLimit(10)
    made_by = {call(thread, limit, threading.get_ident) for _ in range(5)}
    assert len(made_by) == 1 and threading.get_ident() not in made_by
    assert call(thread, limit, divmod, 7, 2) == (3, 1)


ERRORS = [KeyError("a"), TimeoutError("its own"), AssertionError("b")]


@pytest.mark.parametrize("error", [*ERRORS, SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_what_the_environment_raises_is_raised_and_ends_neither_process_nor_thread(error):
    def fails():
        raise error

    thread, limit = EnvironmentThread(), TimeLimit(10)
    expected = error if error in ERRORS else RuntimeError(repr(error))
    with pytest.raises(type(expected)) as raised:
        call(thread, limit, fails)
    assert raised.value.args == expected.args
    assert call(thread, limit, int) == 0, "the next call works"


def test_a_call_that_hangs_is_named_and_closed_once_it_returns():
    release, closed = threading.Event(), threading.Event()
    thread, limit = EnvironmentThread(), TimeLimit(0.05)
    own = call(thread, TimeLimit(10), threading.current_thread)

    def step():
        release.wait(30)

    with pytest.raises(TimeoutError, match=r"\bstep\b.* 0\.05 s"):
        call(thread, limit, step)
    thread.leave(closed.set)
    assert own.daemon and own.is_alive() and not closed.is_set()
    release.set()
    own.join(10)
    assert closed.is_set() and not own.is_alive()


def test_the_thread_ends_even_if_closing_fails():
    thread = EnvironmentThread()
    own = call(thread, TimeLimit(10), threading.current_thread)
    thread.leave(lambda: 1 / 0)
    own.join(10)
    assert not own.is_alive()


def test_the_calls_of_a_rollout_share_one_limit():
    thread, limit = EnvironmentThread(), TimeLimit(0.6)
    release = threading.Event()
    with pytest.raises(TimeoutError, match=r"\bwait\b.* 0\.6 s"):
        for _ in range(30):
            call(thread, limit, release.wait, 0.1)
    assert call(thread, TimeLimit(0.6), int) == 0
