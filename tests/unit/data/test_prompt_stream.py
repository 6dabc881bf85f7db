"""The prompt stream: order, shares of a mix, and restored positions."""

from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lib.prompts import Prompts
from lib.properties import many

from grpo_components.data.prompt_mix import PromptMix
from grpo_components.data.prompt_stream import PromptStream
from grpo_components.state_files import read_state, write_state


def stream(num_rows, shuffle=True):
    rows = [{"prompt_index": i} for i in range(num_rows)]
    return PromptStream(rows, shuffle=shuffle, seed=3)


def mix(*parts, shuffle=True, seed=3):
    """A stream over parts, each (number of rows, weight), whose prompt_index values have gaps."""
    given = {}
    for number, (num_rows, weight) in enumerate(parts):
        rows = Prompts({"prompt_index": 2 * i} for i in range(num_rows))
        given[f"part_{number}"] = rows, weight
    built = PromptMix(given)
    return PromptStream(built, shuffle=shuffle, seed=seed), built.parts


def test_every_epoch_has_every_row_once_and_an_order_of_its_own():
    pairs = list(islice(stream(num_rows=20), 60))
    orders = [[row["prompt_index"] for row, e in pairs if e == epoch] for epoch in range(3)]
    assert all(sorted(order) == list(range(20)) for order in orders)
    assert orders[0] != orders[1] != orders[2]


PARTS = st.lists(st.tuples(st.integers(1, 5), st.floats(0.05, 9)), min_size=1, max_size=4)


@given(parts=PARTS, seed=st.integers(0, 9), length=st.integers(1, 80))
def test_each_part_of_a_mix_has_its_share_at_any_time(parts, seed, length):
    whole, _ = mix(*parts, seed=seed)
    firsts = [sum(2 * n - 1 for n, _ in parts[:number]) for number in range(len(parts) + 1)]
    total = sum(weight for _, weight in parts)
    drawn = [0] * len(parts)
    for count, (row, _) in enumerate(islice(whole, length), start=1):
        drawn[sum(row["prompt_index"] >= first for first in firsts[1:])] += 1
        for (_, weight), number in zip(parts, drawn, strict=True):
            assert abs(number - count * weight / total) < len(parts) + 1


@given(parts=PARTS, seed=st.integers(0, 9))
def test_each_prompt_of_a_mix_occurs_once_in_each_epoch(parts, seed):
    whole, built = mix(*parts, seed=seed)
    pairs = [(row["prompt_index"], epoch) for row, epoch in islice(whole, 120)]
    assert len(set(pairs)) == len(pairs)
    for part in built.values():
        indices = {row["prompt_index"] for row in part.rows}
        epochs = [epoch for index, epoch in pairs if index in indices]
        assert epochs == sorted(epochs)
        for epoch in range(max(epochs, default=0)):  # every epoch that has ended
            assert indices == {index for index, e in pairs if e == epoch and index in indices}


def test_the_seed_decides_the_order_of_a_mix():
    parts = [(4, 1.0), (7, 2.0)]
    first, again, other = (list(islice(mix(*parts, seed=s)[0], 40)) for s in (3, 3, 4))
    assert first == again != other
    kept_in_order = (islice(mix(*parts, shuffle=False, seed=s)[0], 40) for s in range(9))
    # The seed also decides which part comes when.
    assert len({str(list(pairs)) for pairs in kept_in_order}) > 1


@settings(max_examples=many(60), deadline=None)
@given(
    parts=PARTS,
    shuffle=st.booleans(),
    is_mix=st.booleans(),
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    beyond=st.none() | st.integers(0, 9),
)
def test_a_restored_stream_yields_what_it_would_have(
    tmp_path_factory, parts, shuffle, is_mix, lengths, beyond
):
    """At the start, within an epoch, at its very end, and again right after a restore.

    It is a new one, or one that was at another place.
    """

    def new():
        return mix(*parts, shuffle=shuffle)[0] if is_mix else stream(parts[0][0], shuffle)

    folder = tmp_path_factory.mktemp("state")
    whole = list(islice(new(), sum(lengths) + 12))
    current, seen = new(), []
    for number, length in enumerate(lengths):
        seen += islice(current, length)
        write_state(folder, f"{number}", current.state_dict())
        if beyond is None:
            current = new()
        list(islice(current, beyond or 0))
        current.load_state_dict(read_state(folder, f"{number}"))
    seen += islice(current, 12)
    assert seen == whole


def test_the_state_of_other_data_is_refused():
    state = mix((5, 1.0), (3, 1.0))[0].state_dict()
    with pytest.raises(ValueError, match=r"^dataset: .*5 \+ 4 .*; allowed: .*5 \+ 3 "):
        mix((5, 1.0), (4, 1.0))[0].load_state_dict(state)
    with pytest.raises(ValueError, match=r"^dataset: .*\b8 .*; allowed: .*5 \+ 3 "):
        stream(8).load_state_dict(state)
