"""What the handle of a role says of its process's end; its lives are tested in test_cluster.py."""

import math
from types import SimpleNamespace

import pytest
from ray.exceptions import OutOfMemoryError

from grpo_components.cluster.restarts import RestartBudget
from grpo_components.cluster.role import Role

OUT_OF_MEMORY = """Task was killed due to the node running low on memory.
Memory on the node (IP: 127.0.0.1, ID: 899bf4) was 22.65GB used / 23.54GB limit (0.962363)
Object store memory usage: [- objects spillable: 1 - bytes spillable: 8006451]
Top 10 memory users: PID MEM(GB) COMMAND 31908 15.90 a neighbour"""


@pytest.fixture
def role():
    def host(life):
        return SimpleNamespace(_actor_id=b"0"), None

    def nobody(*_, **__):
        raise AssertionError("nothing is restarted here")

    budget = RestartBudget(0, math.inf)
    told = {"note": nobody, "record": nobody, "started": nobody}
    return Role("generator_0", "generator_0.log", host, budget=budget, names={}, **told)


@pytest.mark.parametrize(
    ("text", "figures"),
    [(OUT_OF_MEMORY, ", 22.65GB of 23.54GB in use"), ("in other words", "")],
)
def test_a_full_memory_is_told_in_one_short_line_and_is_no_error_of_the_code(role, text, figures):
    failure = role._failure(OutOfMemoryError(text), "generate_group")
    assert failure.what == f"died: killed because the machine's memory was full{figures}"
    assert failure.kind == "died"
