"""A delta gives back every byte, is never longer than its bound, and refuses what is no delta."""

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_components.exchange import byte_delta
from grpo_components.exchange.byte_delta import apply, encode, most_bytes

BLOCK = 2**10
"""Small, so that arrays have several blocks."""


@pytest.fixture(autouse=True, scope="module")
def small_blocks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(byte_delta, "_BLOCK", BLOCK)
        yield


def rebuilt(new, base, itemsize):
    delta = encode(new, base, itemsize)
    assert len(delta) <= most_bytes(len(base), itemsize)
    raw = base.copy()
    apply(delta, raw, itemsize)
    assert raw.tobytes() == new.tobytes()
    return delta


@st.composite
def arrays(draw):
    """An array, and another one in which a share of the elements has other bytes."""
    itemsize = draw(st.sampled_from([1, 2, 4, 8]))
    count = draw(st.integers(0, 3 * BLOCK))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    base = random.integers(0, 256, (count, itemsize), np.uint8)
    share = draw(st.sampled_from([0, 1e-4, 1e-3, 0.02, 0.1, 0.3, 0.8, 1]))
    planes = draw(st.integers(1, itemsize))
    new = base.copy()
    mask = random.random((count, planes)) < share
    new[:, :planes][mask] ^= random.integers(1, 256, int(mask.sum()), np.uint8)
    return new.ravel(), base.ravel(), itemsize


@given(arrays())
def test_what_is_applied_is_what_was_encoded(case):
    new, base, itemsize = case
    delta = rebuilt(new, base, itemsize)
    assert len(delta) == 0 or new.tobytes() != base.tobytes()


@pytest.mark.parametrize("distance", [0, 1, 254, 255, 256, 510, 511, BLOCK - 1, BLOCK, 2 * BLOCK])
def test_any_distance_between_two_changes_is_kept(distance):
    base = np.zeros(3 * BLOCK, np.uint8)
    for first in (0, 1, 255, BLOCK - 1):
        new = base.copy()
        new[[first, (first + distance) % len(new)]] = 7
        assert len(rebuilt(new, base, 1)) < 40


def test_the_longest_distance_of_16_bits_is_kept(monkeypatch):
    monkeypatch.setattr(byte_delta, "_BLOCK", 2**18)
    base = np.zeros(2**18, np.uint8)
    for second in (65535, 65536, 131071, 131072, 2**18 - 1):
        new = base.copy()
        new[[0, second]] = 1
        assert len(rebuilt(new, base, 1)) < 30


def test_few_changes_take_few_bytes_and_low_bytes_are_apart_from_high_ones():
    random = np.random.default_rng(0)
    base = random.integers(0, 256, (16 * BLOCK, 2), np.uint8)
    new = base.copy()
    new[random.permutation(len(base))[: len(base) // 100], 0] ^= 1
    assert len(encode(new.ravel(), base.ravel(), 2)) < 3 * len(base) / 100
    new[:, 0] ^= 1  # every element, but half of the bytes
    assert len(encode(new.ravel(), base.ravel(), 2)) < 0.51 * base.size


@given(arrays(), st.data())
def test_no_damage_writes_elsewhere_or_raises_anything_else(case, data):
    """What other bytes it leaves is for the checksum of the rebuilt tensor to find."""
    new, base, itemsize = case
    delta = encode(new, base, itemsize)
    if not len(delta):
        return
    delta[data.draw(st.integers(0, len(delta) - 1))] = data.draw(st.integers(0, 255))
    around = np.full(len(base) + 16, 5, np.uint8)
    around[8:-8] = base
    with contextlib.suppress(ValueError):
        apply(delta, around[8:-8], itemsize)
    assert (around[:8] == 5).all() and (around[-8:] == 5).all()
