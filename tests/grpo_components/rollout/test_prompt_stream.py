"""A restored stream of prompts goes on as if it had never stopped."""

import copy
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_components.exchange.state_files import read_state, write_state
from grpo_components.rollout.prompt_stream import PromptStream


def stream(num_rows=5, shuffle=True, seed=3):
    rows = [{"prompt_index": i} for i in range(num_rows)]
    return PromptStream(rows, shuffle=shuffle, seed=seed)


def test_every_epoch_has_every_row_once_and_an_order_of_its_own():
    pairs = list(islice(stream(num_rows=20), 60))
    orders = [[row["prompt_index"] for row, e in pairs if e == epoch] for epoch in range(3)]
    assert all(sorted(order) == list(range(20)) for order in orders)
    assert orders[0] != orders[1] != orders[2]


def test_without_shuffling_the_rows_keep_their_order():
    assert [(r["prompt_index"], e) for r, e in islice(stream(2, shuffle=False), 5)] == [
        *((0, 0), (1, 0), (0, 1), (1, 1), (0, 2)),
    ]


@settings(max_examples=60, deadline=None)
@given(
    num_rows=st.integers(1, 6),
    shuffle=st.booleans(),
    lives=st.lists(st.integers(0, 9), min_size=1, max_size=4),
)
def test_however_often_it_is_restored_it_yields_what_it_would_have(
    tmp_path_factory, num_rows, shuffle, lives
):
    """At the start, within an epoch, at its very end, and again right after a restore."""
    folder = tmp_path_factory.mktemp("state")
    whole = list(islice(stream(num_rows, shuffle), sum(lives) + 12))
    current, seen = stream(num_rows, shuffle), []
    for number, length in enumerate(lives):
        seen += islice(current, length)
        write_state(folder, f"{number}", current.state_dict())
        current = stream(num_rows, shuffle)
        current.load_state_dict(read_state(folder, f"{number}"))
    seen += islice(current, 12)
    assert seen == whole


@given(num_rows=st.integers(1, 6), before=st.integers(0, 9), beyond=st.integers(0, 9))
def test_one_in_use_goes_back_to_an_earlier_state(num_rows, before, beyond):
    current = stream(num_rows)
    whole = list(islice(stream(num_rows), before + 12))
    list(islice(current, before))
    state = copy.deepcopy(current.state_dict())
    list(islice(current, beyond))
    current.load_state_dict(state)
    assert list(islice(current, 12)) == whole[before:]


def test_another_number_of_rows_is_refused():
    with pytest.raises(ValueError, match="dataset: it has 4 rows; allowed: the 5 rows"):
        stream(4).load_state_dict(stream(5).state_dict())
