"""Micro-batch plans: nothing lost, equal counts, within the budget, prompts computed once."""

from hypothesis import given
from hypothesis import strategies as st

from grpo_components.models.micro_batches import (
    micro_batch_cost,
    padded_micro_batches,
    plan_micro_batches,
)
from grpo_components.models.shared_prompts import Part

PROMPTS = st.lists(st.integers(1, 30), min_size=1, max_size=6)
RANKS, BUDGET = st.integers(1, 5), st.integers(1, 120)


@st.composite
def batches(draw):
    prompts = draw(PROMPTS)
    numbers = draw(st.lists(st.integers(0, len(prompts) - 1), min_size=1, max_size=30))
    return [Part(n, prompts[n], draw(st.integers(0, 50))) for n in numbers]


def cost(tokens, earlier):
    return 7.0 * tokens + tokens**2 + 2.0 * tokens * earlier


def tokens_of(parts, indices):
    return micro_batch_cost(parts, indices, lambda tokens, _: tokens)


def alone(parts):
    return [part._replace(prompt=number) for number, part in enumerate(parts)]


def time_of(plan, parts):
    """The cost of each round of micro-batches, in which ranks wait for the costliest."""
    return sum(max(micro_batch_cost(parts, b, cost) for b in r) for r in zip(*plan, strict=True))


@given(batches(), RANKS, BUDGET)
def test_every_response_is_in_one_micro_batch_of_as_many_on_every_rank_within_the_budget(
    parts, num_ranks, budget
):
    plan = plan_micro_batches(parts, cost, num_ranks, budget)
    assert sorted(i for rank in plan for b in rank for i in b) == list(range(len(parts)))
    assert len(plan) == num_ranks and len({len(rank) for rank in plan}) == 1
    assert all(any(micro_batches) for micro_batches in zip(*plan, strict=True))
    for batch in (b for rank in plan for b in rank):
        assert tokens_of(parts, batch) <= budget or len(batch) == 1  # too long alone
    without = plan_micro_batches(alone(parts), cost, num_ranks, budget)
    assert time_of(plan, parts) <= time_of(without, alone(parts)) * (1 + 1e-9)


@given(batches(), BUDGET)
def test_one_rank_recomputes_a_prompt_only_where_its_group_exceeds_the_budget(parts, budget):
    (rank,) = plan_micro_batches(parts, cost, 1, budget)
    for prompt in {part.prompt for part in parts}:
        group = [i for i, part in enumerate(parts) if part.prompt == prompt]
        if tokens_of(parts, group) <= budget:
            assert sum(not set(group).isdisjoint(batch) for batch in rank) == 1


@given(batches(), RANKS)
def test_without_a_limit_no_two_ranks_differ_by_more_than_the_costliest_group(parts, num_ranks):
    plan = plan_micro_batches(parts, cost, num_ranks, 10**6)
    loads = [sum(micro_batch_cost(parts, b, cost) for b in rank) for rank in plan]
    groups = {part.prompt: [] for part in parts}
    for index, part in enumerate(parts):
        groups[part.prompt].append(index)
    costliest = max(micro_batch_cost(parts, group, cost) for group in groups.values())
    assert max(loads) - min(loads) <= costliest + 1e-6


def test_a_group_is_cut_where_ranks_would_wait_and_not_where_the_prompt_dominates():
    short = [Part("a", 1, 50)] * 8
    assert [len(b) for rank in plan_micro_batches(short, cost, 2, 1000) for b in rank] == [4, 4]
    long = [Part("a", 400, 1)] * 8
    assert {len(b) for rank in plan_micro_batches(long, cost, 2, 1000) for b in rank} <= {0, 4, 8}


def test_nothing_to_plan_is_no_micro_batch():
    assert plan_micro_batches([], cost, 2, 10) == [[], []]
    assert [padded_micro_batches(lengths, 1) for lengths in ([], [5])] == [[], [[0]]]


LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=30)


@given(LENGTHS, BUDGET)
def test_padded_micro_batches_lose_nothing_are_sorted_and_fill_the_budget(lengths, budget):
    plan = padded_micro_batches(lengths, budget)
    order = [index for batch in plan for index in batch]
    assert sorted(order) == list(range(len(lengths)))
    assert [lengths[i] for i in order] == sorted(lengths, reverse=True)
    for number, batch in enumerate(plan):
        longest = max(lengths[i] for i in batch)
        assert len(batch) * longest <= budget or len(batch) == 1
        assert number + 1 == len(plan) or (len(batch) + 1) * longest > budget
