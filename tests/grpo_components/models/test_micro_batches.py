"""Micro-batch plans: nothing lost, equal counts, within the budget, and as dear on every rank."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from grpo_components.models.micro_batches import plan_micro_batches

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=30)
RANKS, BUDGET, PACKED = st.integers(1, 5), st.integers(1, 120), st.booleans()


def cost(length):
    return 7.0 * length + length**2


def planned(lengths, num_ranks, budget, packed=False):
    costs = [cost(length) for length in lengths]
    return plan_micro_batches(lengths, costs, num_ranks, budget, packed=packed)


def members(rank):
    return [index for micro_batch in rank for index in micro_batch]


@given(LENGTHS, RANKS, BUDGET, PACKED)
def test_every_trajectory_is_in_exactly_one_micro_batch(lengths, num_ranks, budget, packed):
    plan = planned(lengths, num_ranks, budget, packed)
    assert sorted(i for rank in plan for i in members(rank)) == list(range(len(lengths)))


@given(LENGTHS, RANKS, BUDGET, PACKED)
def test_every_rank_has_as_many_micro_batches_and_nearly_as_many_trajectories(
    lengths, num_ranks, budget, packed
):
    plan = planned(lengths, num_ranks, budget, packed)
    assert len(plan) == num_ranks
    assert len({len(rank) for rank in plan}) == 1
    counts = [len(members(rank)) for rank in plan]
    assert max(counts) - min(counts) <= 1


@given(LENGTHS, RANKS, BUDGET, PACKED)
def test_tokens_stay_within_the_budget_unless_one_is_too_long_alone(lengths, ranks, budget, packed):
    plan = planned(lengths, ranks, budget, packed)
    for batch in (b for rank in plan for b in rank if b):
        inside = [lengths[i] for i in batch]
        tokens = sum(inside) if packed else len(batch) * max(inside)
        assert tokens <= budget or len(batch) == 1


@given(LENGTHS, RANKS, BUDGET, PACKED)
def test_no_two_ranks_differ_by_more_than_the_costliest_trajectory(lengths, ranks, budget, packed):
    plan = planned(lengths, ranks, budget, packed)
    loads = [sum(cost(lengths[i]) for i in members(rank)) for rank in plan]
    assert max(loads) - min(loads) <= cost(max(lengths)) + 1e-6


@given(LENGTHS, RANKS, BUDGET)
def test_micro_batches_are_sorted_by_length(lengths, num_ranks, budget):
    for rank in planned(lengths, num_ranks, budget):
        ordered = [lengths[i] for i in members(rank)]
        assert ordered == sorted(ordered, reverse=True)


@given(LENGTHS, BUDGET)
def test_one_rank_opens_a_micro_batch_only_when_the_one_before_is_full(lengths, budget):
    (rank,) = planned(lengths, 1, budget)
    for full, after in pairwise(rank):
        assert after and (len(full) + 1) * max(lengths[i] for i in full) > budget


def test_packing_fills_what_is_left_of_earlier_micro_batches():
    (rank,) = planned([60, 60, 30, 30], 1, 100, packed=True)
    assert rank == [[0, 2], [1, 3]]


def test_long_trajectories_next_to_each_other_go_to_different_ranks():
    """Halves of the batch would give all the long ones to the first rank."""
    first, second = planned([50] * 4 + [5] * 4, 2, 120)
    assert len(members(first)) == len(members(second)) == 4
    for rank in (first, second):
        assert sum(i < 4 for i in members(rank)) == 2
