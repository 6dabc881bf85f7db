"""The message for the death of a role's process; restarts are tested in test_cluster.py."""

import pytest
from ray.exceptions import OutOfMemoryError

from grpo_components.cluster.role_failures import role_failure

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
