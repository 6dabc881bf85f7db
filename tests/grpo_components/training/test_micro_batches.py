"""Micro-batch plans: nothing lost, equal counts, within the budget."""

from hypothesis import given
from hypothesis import strategies as st

from grpo_components.training.micro_batches import plan_micro_batches

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=30)


@given(LENGTHS, st.integers(1, 5), st.integers(1, 120))
def test_every_trajectory_is_in_exactly_one_micro_batch(lengths, num_ranks, budget):
    plan = plan_micro_batches(lengths, num_ranks, budget)
    assert sorted(i for rank in plan for batch in rank for i in batch) == list(range(len(lengths)))


@given(LENGTHS, st.integers(1, 5), st.integers(1, 120))
def test_every_rank_has_as_many_micro_batches(lengths, num_ranks, budget):
    plan = plan_micro_batches(lengths, num_ranks, budget)
    assert len(plan) == num_ranks
    assert len({len(rank) for rank in plan}) == 1


@given(LENGTHS, st.integers(1, 5), st.integers(1, 120))
def test_padded_tokens_stay_within_the_budget_unless_one_is_too_long_alone(lengths, ranks, budget):
    for batch in (b for rank in plan_micro_batches(lengths, ranks, budget) for b in rank if b):
        padded = len(batch) * max(lengths[i] for i in batch)
        assert padded <= budget or len(batch) == 1


@given(LENGTHS, st.integers(1, 5))
def test_ranks_get_contiguous_parts_in_the_order_of_the_batch(lengths, num_ranks):
    parts = [
        sorted(i for batch in rank for i in batch)
        for rank in plan_micro_batches(lengths, num_ranks, 60)
    ]
    assert [i for part in parts for i in part] == list(range(len(lengths)))
