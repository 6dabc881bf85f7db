"""Pushes are deltas while they take less room together than a whole push; only sizes decide."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from grpo_components.cluster.pushes import MAX_DELTAS, Pushes
from grpo_components.exchange.weight_deltas import NO_BASE
from grpo_components.exchange.weights import TensorDelta, TensorEntry

WHOLE = 1000


class Trainers:
    """Two ranks, whose shares of each delta have given sizes."""

    def __init__(self, sizes):
        self._sizes = sizes
        self.bases, self.reads = [], 0

    def export_weights(self, version, base):
        self.bases.append(base)
        is_delta = base not in (None, NO_BASE)
        deltas = [TensorDelta(0, self._sizes[version] // 2) if is_delta else None] * 2
        manifests = [(TensorEntry("a", "uint8", (), 0, WHOLE // 2, 0, delta),) for delta in deltas]
        return [f"{version} of {rank}" for rank in range(2)], manifests

    async def manifests(self, references):
        self.reads += 1
        return references


def push_all(trainers, deltas, count, forgets=()):
    """The chains and the sizes of the pushes, as the server and the metrics get them."""

    async def run():
        pushes, found = Pushes(trainers, deltas=deltas), []
        for version in range(count):
            if version in forgets:
                pushes.forget()
            await pushes.wait_packed()
            _, _, chain = pushes.begin(version)
            found.append((pushes.nbytes, chain))
        return found

    return asyncio.run(run())


SIZES = st.one_of(st.integers(0, 20), st.integers(0, 100), st.integers(0, WHOLE))


@given(st.lists(SIZES.map(lambda size: 2 * (size // 2)), min_size=1, max_size=80), st.data())
def test_a_chain_begins_whole_and_has_every_link_up_to_its_bounds(sizes, data):
    count = len(sizes)
    forgets = data.draw(st.sets(st.integers(0, count - 1), max_size=2))
    trainers = Trainers(sizes)
    chains = [chain for _, chain in push_all(trainers, True, count, forgets)]
    for version, (base, chain) in enumerate(zip(trainers.bases, chains, strict=True)):
        links = [number for number, _ in chain]
        if base == NO_BASE:
            assert links == []
            continue
        assert base == version - 1 == links[-1]
        assert links == list(range(links[0], version))
        assert trainers.bases[links[0]] == NO_BASE and version not in forgets
        earlier = [sizes[number] for number in links[1:]]
        assert len(earlier) < MAX_DELTAS
        assert not earlier or sum(earlier) + earlier[-1] <= WHOLE
        assert all(
            buckets == [f"{number} of {rank}" for rank in range(2)] for number, buckets in chain
        )
    again = Trainers(sizes)
    assert [chain for _, chain in push_all(again, True, count, forgets)] == chains


def test_a_push_is_whole_again_only_once_the_chain_is_as_long():
    trainers = Trainers([400] * 8)
    push_all(trainers, True, 8)
    assert [base == NO_BASE for base in trainers.bases] == [True, False, False] * 2 + [True, False]
    few = Trainers([2] * (MAX_DELTAS + 3))
    push_all(few, True, MAX_DELTAS + 3)
    whole = [version for version, base in enumerate(few.bases) if base == NO_BASE]
    assert whole == [0, MAX_DELTAS + 1]


def test_the_size_is_that_of_the_push_before():
    found = push_all(Trainers([0, 30, 50, 0]), True, 4)
    assert [nbytes for nbytes, _ in found] == [0, WHOLE, 30, 50]


def test_whole_pushes_have_no_base_and_nobody_waits_for_their_sizes_again():
    trainers = Trainers([])
    found = push_all(trainers, False, 9, forgets={4})
    assert trainers.bases == [None] * 9
    assert [nbytes for nbytes, _ in found] == [0] + [WHOLE] * 8
    assert all(chain == [] for _, chain in found)
    assert trainers.reads == 2  # the first of each attempt
