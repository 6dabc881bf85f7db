"""What fits onto nodes, and what the user reads when roles do not fit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_components.cluster.placement import Need, _check_room, family_of, fits

amounts = st.integers(1, 4)


@given(st.lists(amounts, max_size=6), st.lists(st.integers(1, 8), min_size=1, max_size=4))
def test_what_fits_has_room_on_each_node(wanted, nodes):
    found = fits([{"GPU": n} for n in wanted], [{"GPU": n, "CPU": 1} for n in nodes])
    if found:
        assert sum(wanted) <= sum(nodes) and max(wanted, default=0) <= max(nodes)
    if len(nodes) == 1:
        assert found == (sum(wanted) <= nodes[0])
    if all(n == 1 for n in wanted):
        assert found == (len(wanted) <= sum(nodes))


def test_no_process_is_split_over_two_nodes():
    assert not fits([{"GPU": 2}], [{"GPU": 1}, {"GPU": 1}])
    assert fits([{"GPU": 0.6}, {"GPU": 0.4}], [{"GPU": 1}])
    assert not fits([{"GPU": 0.6}, {"GPU": 0.6}], [{"GPU": 1}])


@pytest.mark.parametrize(
    ("needs", "says"),
    [
        (
            {"generator": Need(1, {"GPU": 4}, "SPREAD", {})},
            "gpus_per_generator: one process needs 4 GPU, .* largest node has 2",
        ),
        (
            {"trainer": Need(1, {"CPU": 9}, "PACK", {})},
            "cpu_threads.trainer: one process needs 9 CPU",
        ),
        (
            {"trainer": Need(4, {"GPU": 1}, "PACK", {}, together=4, guests="generator")},
            "generator.tensor_parallel_size: 4 given, and the cluster's largest node has 2 GPU",
        ),
        (
            {
                "trainer": Need(3, {"GPU": 1}, "PACK", {}),
                "generator": Need(2, {"GPU": 1}, "SPREAD", {}),
            },
            "ray.address: its 2 nodes with 4 GPU have no room for trainer 3 x 1 GPU, generator 2",
        ),
    ],
)
def test_a_cluster_that_is_too_small_is_refused_with_the_key_to_change(needs, says):
    nodes = [{"GPU": 2, "CPU": 8}, {"GPU": 2, "CPU": 8}]
    with pytest.raises(ValueError, match=says):
        _check_room(needs, nodes)
    _check_room({"trainer": Need(4, {"GPU": 1}, "PACK", {})}, nodes)
    _check_room({"trainer": Need(4, {"GPU": 1}, "PACK", {}, together=2)}, nodes)


def test_a_family_is_the_name_without_its_number():
    assert [family_of(name) for name in ("trainer_0", "generator_12")] == ["trainer", "generator"]
    assert [family_of(name) for name in ("reward_model", "replay_buffer")] == [
        "reward_model",
        "replay_buffer",
    ]
