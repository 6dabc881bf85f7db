"""Encodes which bytes of an array changed, and what they became."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

_BLOCK = 2**18
"""Elements that are encoded at once: bounds the memory of the work, and keeps it in the cache."""
_SAME, _GAPS_8, _GAPS_16, _BITMAP, _ALL = range(5)
"""How a plane is encoded: not at all; as distances between changed bytes, of 8 or 16 bits; as one
bit for each byte; or as all of its bytes. The first byte of each plane says which."""
_GAPS = {_GAPS_8: np.dtype("<u1"), _GAPS_16: np.dtype("<u2")}
_COUNT = np.dtype("<u4")


def encode(new: Bytes, base: Bytes, itemsize: int) -> Bytes:
    """Encode what changed from one array to another; `apply` repeats the change.

    Bytes are compared, not values: so NaNs and zeros of either sign come out as they were. In each
    block of elements, the first bytes of all elements form a plane, the second bytes the next one:
    an optimizer's small step changes the low bytes of many elements and the high bytes of few.
    Each plane takes the shortest of five encodings.
    """
    assert new.shape == base.shape and len(new) % itemsize == 0, "arrays of different layouts"
    parts: list[Bytes] = []
    changed = False
    for part in _blocks(len(new), itemsize):
        for plane in (new[part] ^ base[part]).reshape(-1, itemsize).T:
            encoded = _encode_plane(np.ascontiguousarray(plane))
            changed |= len(encoded) > 1
            parts += encoded
    return np.concatenate(parts) if changed else np.empty(0, np.uint8)


def most_bytes(nbytes: int, itemsize: int) -> int:
    """Return the size of the longest delta: all bytes, and one for each plane of each block."""
    return nbytes + itemsize * sum(1 for _ in _blocks(nbytes, itemsize))


def apply(delta: Bytes, raw: Bytes, itemsize: int) -> None:
    """Change an array in place, from the base of a delta to what was encoded."""
    if not len(delta):
        return
    at = 0
    for part in _blocks(len(raw), itemsize):
        block = raw[part].reshape(-1, itemsize)
        for number in range(itemsize):
            at = _apply_plane(delta, at, block[:, number])
    if at != len(delta):
        raise ValueError(f"the delta has {len(delta)} bytes, and {at} were expected")


def _blocks(nbytes: int, itemsize: int) -> Iterator[slice]:
    step = _BLOCK * itemsize
    return (slice(begin, begin + step) for begin in range(0, nbytes, step))


def _encode_plane(plane: Bytes) -> list[Bytes]:
    """Encode [m] bytes, 0 where nothing changed, as a kind and what belongs to it."""
    changed = plane != 0
    count, size = int(np.count_nonzero(changed)), len(plane)
    if not count:
        return [_kind(_SAME)]
    bitmap = -(-size // 8) + count
    if bitmap >= size:
        return [_kind(_ALL), plane]
    positions = np.flatnonzero(changed)  # several times faster than an index of bools
    values = plane[positions]
    encodings = [[_kind(_BITMAP), np.packbits(changed), values]]
    if 2 * count < bitmap:
        gaps = np.diff(positions, prepend=-1)
        encodings += [_encode_gaps(kind, gaps, values) for kind in _GAPS]
    return min(encodings, key=lambda parts: sum(map(len, parts)))


def _encode_gaps(kind: int, gaps: NDArray[np.int64], values: Bytes) -> list[Bytes]:
    """Encode the distances between changed bytes; those that are too long in several steps."""
    longest = int(np.iinfo(_GAPS[kind]).max)
    steps = (gaps - 1) // longest + 1
    last = np.cumsum(steps) - 1
    entries = int(last[-1]) + 1
    # Each step but the last ends at a byte that stays, as a change by 0.
    distances, changes = np.full(entries, longest, _GAPS[kind]), np.zeros(entries, np.uint8)
    distances[last], changes[last] = gaps - (steps - 1) * longest, values
    count = np.array([entries], _COUNT)
    return [_kind(kind), count.view(np.uint8), distances.view(np.uint8), changes]


def _kind(kind: int) -> Bytes:
    return np.array([kind], np.uint8)


def _apply_plane(delta: Bytes, at: int, plane: Bytes) -> int:
    """Change a plane, a view of every n-th byte; return where the next plane's encoding begins."""

    def take(nbytes: int) -> Bytes:
        nonlocal at
        if at + nbytes > len(delta):
            raise ValueError(f"the delta ends after {len(delta)} bytes, and more were expected")
        at += nbytes
        return delta[at - nbytes : at]

    kind, size = int(take(1)[0]), len(plane)
    if kind == _ALL:
        plane ^= take(size)
    elif kind == _BITMAP:
        positions = np.flatnonzero(np.unpackbits(take(-(-size // 8)), count=size).view(np.bool_))
        plane[positions] ^= take(len(positions))
    elif kind in _GAPS:
        entries = int(take(_COUNT.itemsize).view(_COUNT)[0])
        distances = take(entries * _GAPS[kind].itemsize).view(_GAPS[kind])
        positions = np.cumsum(distances, dtype=np.int64) - 1
        values = take(entries)
        if not entries or not distances.all() or positions[-1] >= size:
            raise ValueError("the delta changes bytes that the tensor does not have")
        plane[positions] ^= values
    elif kind != _SAME:
        raise ValueError(f"the delta has an unknown encoding {kind}")
    return at
