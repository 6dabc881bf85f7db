"""Who gets the next place: nobody waits for all that a greedy caller asks for."""

import threading

import pytest

from grpo_components.rewards.sandbox.fair_places import FairPlaces

WAIT_S = 60


def queue_up(places, callers):
    """Have callers wait, one after the other, and give back the order in which they had a place."""
    order, threads = [], []

    def call(name, used_s):
        with places.place(used_s, WAIT_S):
            order.append(name)

    with places.place(0.0, WAIT_S):
        for name, used_s in callers:
            thread = threading.Thread(target=call, args=(name, used_s))
            thread.start()
            threads.append(thread)
            while places.waiting < len(threads):
                assert thread.is_alive()
    for thread in threads:
        thread.join(WAIT_S)
    return order


def test_callers_that_have_used_the_same_go_as_they_came():
    assert queue_up(FairPlaces(1), [(n, 5.0) for n in range(6)]) == list(range(6))


def test_who_has_used_less_goes_before_those_who_have_used_more():
    callers = [("greedy", 500.0), ("greedier", 900.0), ("new", 0.0), ("modest", 100.0)]
    assert queue_up(FairPlaces(1), callers) == ["new", "modest", "greedy", "greedier"]


def test_a_caller_that_waited_in_vain_leaves_the_queue():
    places = FairPlaces(1)
    with places.place(0.0, WAIT_S), pytest.raises(TimeoutError), places.place(0.0, 0.01):
        pass
    assert places.waiting == 0
    with places.place(0.0, WAIT_S):
        pass


def test_a_place_is_free_again_after_an_error():
    places = FairPlaces(1)
    for _ in range(3):
        with pytest.raises(KeyError), places.place(0.0, WAIT_S):
            raise KeyError
