"""The fair queue: no caller waits behind all requests of a heavy user."""

import threading

import pytest

from grpo_components.rewards.sandbox.code_sandbox import FairQueue, SandboxError

WAIT_S = 60


def line_up(queue, callers):
    """Let callers wait, one after the other, and return the order in which they got a slot."""
    order, threads = [], []

    def call(name, used_s):
        with queue.slot(used_s, WAIT_S):
            order.append(name)

    with queue.slot(0.0, WAIT_S):
        for name, used_s in callers:
            thread = threading.Thread(target=call, args=(name, used_s))
            thread.start()
            threads.append(thread)
            while len(queue.waiting) < len(threads):
                assert thread.is_alive()
    for thread in threads:
        thread.join(WAIT_S)
    return order


def test_a_caller_that_used_less_is_served_first():
    callers = [("greedy", 500.0), ("greedier", 900.0), ("new", 0.0), ("modest", 100.0)]
    assert line_up(FairQueue(1), callers) == ["new", "modest", "greedy", "greedier"]


def test_a_caller_whose_wait_timed_out_leaves_the_queue():
    queue = FairQueue(1)
    with queue.slot(0.0, WAIT_S), pytest.raises(SandboxError), queue.slot(0.0, 0.01):
        pass
    assert queue.waiting == []
    with queue.slot(0.0, WAIT_S):
        pass
