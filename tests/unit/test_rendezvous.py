"""Ranks find each other on a port that is open before its number is known."""

import socket

from grpo_components.rendezvous import local_rendezvous, open_rendezvous


def test_an_open_rendezvous_answers_at_once_and_each_has_a_port_of_its_own():
    both = [open_rendezvous() for _ in range(2)]
    assert both[0].port != both[1].port
    for each in both:
        assert each.listener is not None
        socket.create_connection((each.host, each.port), 5).close()
        socket.socket(fileno=each.listener).close()


def test_a_local_rendezvous_leaves_the_port_to_rank_0():
    given = local_rendezvous()
    assert given.listener is None
    with socket.socket() as listener:
        listener.bind((given.host, given.port))
