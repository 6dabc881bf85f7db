"""Weights rebuilt from deltas have the bits of a whole push; wrong or damaged links are errors."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_components.exchange import weight_deltas
from grpo_components.exchange.weight_deltas import (
    NO_BASE,
    DeltaEncoder,
    RebuiltWeights,
    apply,
    encode,
    encode_bucket,
    newest_manifests,
)
from grpo_components.exchange.weights import pack_bucket, snapshot_checksum, unpack_buckets


def tensors(version, rank=0):
    """Small steps of one tensor, rounded ones of another; one never changes."""
    random = torch.Generator().manual_seed(rank)
    noise = torch.Generator().manual_seed(1000 * rank + version)
    weights = torch.randn(64, 32, generator=random)
    return [
        (f"steps.{rank}", weights * (1 + 1e-6 * version)),
        (f"rounded.{rank}", (weights * (1 + 1e-3 * version)).bfloat16()),
        (f"noise.{rank}", torch.randn(33, generator=noise)),
        (f"frozen.{rank}", weights[:3].T),
    ]


class Trainers:
    """Two ranks that push every version."""

    def __init__(self, whole=()):
        self._whole, self._encoders, self._last = whole, [DeltaEncoder(), DeltaEncoder()], NO_BASE
        self.pushes = {}

    def push(self, version):
        base = NO_BASE if version in self._whole else self._last
        self.pushes[version] = [
            encoder.encode(version, pack_bucket(tensors(version, rank)), base)
            for rank, encoder in enumerate(self._encoders)
        ]
        self._last = version

    def buckets(self, *versions):
        return [bucket for version in versions for bucket in self.pushes[version]]


@pytest.fixture
def trainers():
    trainers = Trainers()
    for version in range(1, 7):
        trainers.push(version)
    return trainers


def whole(version):
    return [pack_bucket(tensors(version, rank)) for rank in range(2)]


def assert_loads(weights, version, buckets):
    """What is rebuilt has the bits, names and checksum of a whole push, and is kept."""
    rebuilt = weights.rebuild(version, buckets)
    loaded, expected = unpack_buckets(rebuilt), unpack_buckets(whole(version))
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert loaded[name].dtype == tensor.dtype and loaded[name].shape == tensor.shape
        assert loaded[name].view(torch.uint8).equal(tensor.view(torch.uint8)), name
    pushed = snapshot_checksum(manifest for manifest, _ in whole(version))
    assert snapshot_checksum(manifest for manifest, _ in rebuilt) == pushed
    assert snapshot_checksum(newest_manifests(buckets)) == pushed
    weights.keep(rebuilt)


def test_a_generator_that_pulls_every_version_gets_deltas_alone(trainers):
    weights = RebuiltWeights()
    for version in range(1, 7):
        assert_loads(weights, version, trainers.buckets(version))
    sizes = [sum(len(b.packed) for b in trainers.pushes[version]) for version in (1, 2)]
    assert sizes[1] < 0.6 * sizes[0]


def test_what_is_applied_already_is_skipped_and_what_was_missed_is_applied(trainers):
    """In a replay, a pull may begin before the one before has ended; ranks come in any order."""
    weights = RebuiltWeights()
    assert_loads(weights, 3, [*trainers.buckets(1)[::-1], *trainers.buckets(2, 3)])
    assert_loads(weights, 3, trainers.buckets(3))
    assert_loads(weights, 5, trainers.buckets(1, 2, 3, 4, 5))
    assert_loads(weights, 6, trainers.buckets(5, 6))


def test_a_whole_push_needs_nothing_and_ends_the_chain():
    trainers, weights = Trainers(whole=[4]), RebuiltWeights()
    for version in range(1, 6):
        trainers.push(version)
    assert_loads(weights, 1, trainers.buckets(1))
    assert_loads(weights, 5, trainers.buckets(4, 5))  # 2 and 3 never came
    assert all(entry.base is None for entry in trainers.pushes[4][0].manifest)


def test_weights_of_another_attempt_are_no_base_although_their_version_is(trainers):
    weights = RebuiltWeights()
    changed = [(name, tensor + 1) for name, tensor in tensors(2)]
    other = DeltaEncoder().encode(2, pack_bucket(changed), NO_BASE)
    weights.keep(weights.rebuild(2, [other]))
    with pytest.raises(ValueError, match="version 3 builds on bytes that are not here"):
        weights.rebuild(3, trainers.buckets(3))


def test_after_a_failure_and_after_forget_a_whole_push_is_needed(trainers):
    for fails in (False, True):
        weights = RebuiltWeights()
        assert_loads(weights, 1, trainers.buckets(1))
        if fails:
            with pytest.raises(ValueError, match="builds on"):
                weights.rebuild(3, trainers.buckets(3))
        else:
            weights.forget()
        with pytest.raises(ValueError, match="builds on bytes that are not here"):
            weights.rebuild(2, trainers.buckets(2))
        assert_loads(weights, 2, trainers.buckets(1, 2))


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@given(
    count=st.integers(0, 3000),
    share=st.sampled_from([0, 1e-3, 0.02, 0.3, 1]),
    seed=st.integers(0, 2**32),
)
def test_what_is_applied_is_what_was_encoded(itemsize, count, share, seed):
    random = np.random.default_rng(seed)
    base = random.integers(0, 256, count * itemsize, np.uint8)
    new = np.where(random.random(len(base)) < share, ~base, base)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_deltas, "_BLOCK", 2**10)
        delta, raw = encode(new, base, itemsize), base.copy()
        apply(delta, raw, itemsize)
    assert raw.tobytes() == new.tobytes()
    assert len(delta) <= len(base) + 100


def test_bits_are_compared_and_not_values():
    """NaN payloads and the sign of a zero are kept, although NaN != NaN and -0.0 == 0.0."""
    base = np.array([0.0, -0.0, np.nan, 1.0, np.inf], np.float32)
    new = base.copy()
    new[:2] = [-0.0, 0.0]
    new.view(np.uint32)[2] = 0x7FC12345
    raw = base.copy().view(np.uint8)
    apply(encode(new.view(np.uint8), raw, 4), raw, 4)
    assert raw.tobytes() == new.tobytes()


def test_few_changes_take_few_bytes_and_low_bytes_are_apart_from_high_ones():
    random = np.random.default_rng(0)
    base = random.integers(0, 256, (2**14, 2), np.uint8)
    new = base.copy()
    new[random.permutation(len(base))[: len(base) // 100], 0] ^= 1
    assert len(encode(new.ravel(), base.ravel(), 2)) < 3 * len(base) / 100
    new[:, 0] ^= random.integers(1, 256, len(base), np.uint8)  # every element, half of the bytes
    assert len(encode(new.ravel(), base.ravel(), 2)) < 0.51 * base.size


@given(st.data())
def test_any_flipped_bit_is_found_and_its_tensor_named_or_it_changes_nothing(data):
    """A compressed stream has bits that its reader ignores."""
    trainers = Trainers()
    for version in (1, 2):
        trainers.push(version)
    bucket = trainers.pushes[2][0]
    position = data.draw(st.integers(0, len(bucket.packed) - 1))
    bit = data.draw(st.integers(0, 7))
    name = next(
        entry.name
        for entry in bucket.manifest
        if entry.offset <= position < entry.offset + entry.pushed_nbytes
    )
    damaged = bucket.packed.copy()
    damaged[position] ^= 1 << bit
    pushes = [*trainers.buckets(1), replace(bucket, packed=damaged), trainers.pushes[2][1]]
    try:
        assert_loads(RebuiltWeights(), 2, pushes)
    except ValueError as error:
        assert str(error).startswith(f"weight tensor {name} is damaged")


def test_unchanged_weights_take_no_bytes():
    bucket = pack_bucket(tensors(1))
    manifest, packed = encode_bucket(bucket, pack_bucket(tensors(1)))
    assert len(packed) == 0
    assert [entry.checksum for entry in manifest] == [entry.checksum for entry in bucket[0]]


def test_rebuilding_leaves_the_pushes_as_they_are(trainers):
    """Ray hands the same bytes to every generator of a node."""
    for bucket in trainers.buckets(*range(1, 7)):
        bucket.packed.flags.writeable = False
    before = [bucket.packed.tobytes() for bucket in trainers.buckets(*range(1, 7))]
    for weights in (RebuiltWeights(), RebuiltWeights()):
        assert_loads(weights, 6, trainers.buckets(*range(1, 7)))
    assert [bucket.packed.tobytes() for bucket in trainers.buckets(*range(1, 7))] == before
