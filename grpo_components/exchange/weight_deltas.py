"""Encodes buckets (packed weight tensors) as deltas from the previous push, and decodes them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from grpo_components.exchange.weights import Manifest, TensorEntry

NO_BASE = -1
"""Base version of a push that has all bytes, not a delta."""
Bytes = NDArray[np.uint8]
Bucket = tuple[Manifest, Bytes]
_BLOCK = 2**18
"""Number of elements compared at once, to limit the memory that this takes."""


def encode(new: Bytes, base: Bytes, itemsize: int) -> Bytes:
    """Compress which bits changed from `base` to `new`; `apply` makes the same change again.

    Each block of elements stores the first bytes of all elements, then the second ones. This
    compresses better: an optimizer's small step changes the low bytes of many elements and the high
    bytes of few.
    """
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as packed:
        for part in _blocks(len(new), itemsize):
            changed = (new[part] ^ base[part]).reshape(-1, itemsize)
            packed.write(np.ascontiguousarray(changed.T))
    return np.frombuffer(sink.getvalue(), np.uint8)


def apply(delta: Bytes, raw: Bytes, itemsize: int) -> None:
    """Apply a delta in place: `raw` has the bytes before the change, then those after it."""
    with pa.CompressedInputStream(pa.py_buffer(delta), "zstd") as packed:
        for part in _blocks(len(raw), itemsize):
            block = raw[part].reshape(-1, itemsize)
            changed = np.frombuffer(packed.read(block.nbytes), np.uint8)
            if len(changed) != block.nbytes:
                raise ValueError("the delta ends before the tensor")
            block ^= changed.reshape(itemsize, -1).T
        if packed.read(1):
            raise ValueError("the delta goes on after the tensor")


def _blocks(nbytes: int, itemsize: int) -> Iterator[slice]:
    step = _BLOCK * itemsize
    return (slice(begin, begin + step) for begin in range(0, nbytes, step))


@dataclass(frozen=True)
class DeltaBucket:
    """One trainer rank's share of a push: all bytes, or what changed since its last push."""

    version: int
    """Policy version of the weights."""
    manifest: Manifest
    """Describes each rebuilt tensor; `packed` has a delta for it if its entry's `base` is set."""
    packed: Bytes
    """[nbytes] uint8: the tensors' bytes or compressed changes, one tensor after the other."""


class DeltaEncoder:
    """Encodes the bucket of each push as a delta from the bucket of the push before."""

    def __init__(self) -> None:
        self._last: tuple[int, Manifest, Bytes] | None = None

    def encode(self, version: int, bucket: Bucket, base: int) -> DeltaBucket:
        """Return the changes since version `base` (`NO_BASE`: all), and remember the bucket."""
        last, self._last = self._last, (version, *bucket)
        if base == NO_BASE:
            return DeltaBucket(version, *bucket)
        assert last is not None and last[0] == base, f"version {base} was not the last one"
        manifest, packed = encode_bucket(bucket, last[1:])
        return DeltaBucket(version, manifest, packed)


def encode_bucket(bucket: Bucket, base: Bucket) -> Bucket:
    """Encode what changed from one bucket to another with the same tensors."""
    entries: list[TensorEntry] = []
    deltas, offset = [np.empty(0, np.uint8)], 0
    for new, old in zip(bucket[0], base[0], strict=True):
        same = (new.name, new.dtype, new.shape) == (old.name, old.dtype, old.shape)
        assert same, f"{new.name} was {old.name}"
        nbytes = 0
        if new.checksum != old.checksum:
            deltas.append(
                encode(_bytes_of(new, bucket[1]), _bytes_of(old, base[1]), _itemsize(new))
            )
            nbytes = len(deltas[-1])
        entries.append(replace(new, offset=offset, base=old.checksum, delta_nbytes=nbytes))
        offset += nbytes
    return tuple(entries), np.concatenate(deltas)


class RebuiltWeights:
    """Keeps the bytes of a generator's newest weights, and applies pushed deltas to them.

    A delta applies only to bytes with the right checksum, so never to weights of another attempt
    that have the same version number.
    """

    def __init__(self) -> None:
        self._kept: dict[str, tuple[int, Bytes]] = {}
        """Checksum and bytes of each tensor."""

    def rebuild(self, version: int, pushes: Sequence[DeltaBucket]) -> list[Bucket]:
        """Apply pushes to the kept bytes in place; return the new weights, and keep none of them.

        Deltas that were applied before are skipped. The caller must verify the checksums of the
        returned weights, and call `keep` once they are loaded.
        """
        held, self._kept = self._kept, {}
        newest: dict[str, tuple[TensorEntry, int]] = {}
        for push in pushes:
            for entry in push.manifest:
                newest[entry.name] = entry, push.version
                checksum, raw = held.get(entry.name, (None, np.empty(0, np.uint8)))
                if entry.base is None and entry.checksum != checksum:
                    held[entry.name] = entry.checksum, np.array(_bytes_of(entry, push.packed))
                elif entry.base is not None and entry.base == checksum:
                    _apply(entry, push, raw)
                    held[entry.name] = entry.checksum, raw
        for entry, pushed in newest.values():
            problem = "" if pushed == version else f" of version {version} did not come"
            if not problem and held.get(entry.name, (None,))[0] != entry.checksum:
                problem = f": the push of version {version} builds on bytes that are not here"
            if problem:
                raise ValueError(f"weight tensor {entry.name}{problem}")
        return [
            ((replace(entry, offset=0, base=None),), held[name][1])
            for name, (entry, _) in newest.items()
        ]

    def keep(self, buckets: list[Bucket]) -> None:
        """Keep rebuilt weights as the base of the next deltas; call this once nobody reads them."""
        self._kept = {entry.name: (entry.checksum, raw) for (entry,), raw in buckets}

    def forget(self) -> None:
        """Drop the kept bytes: the next weights come as a whole push."""
        self._kept = {}


def newest_manifests(buckets: Iterable[Any]) -> Iterator[Manifest]:
    """Return the manifests of the buckets; of `DeltaBucket`s, only those of the newest version."""
    buckets = list(buckets)
    if buckets and isinstance(buckets[-1], DeltaBucket):
        newest = buckets[-1].version
        return (bucket.manifest for bucket in buckets if bucket.version == newest)
    return (manifest for manifest, _ in buckets)


def _apply(entry: TensorEntry, push: DeltaBucket, raw: Bytes) -> None:
    if not entry.delta_nbytes:
        return  # nothing changed
    try:
        apply(_bytes_of(entry, push.packed), raw, _itemsize(entry))
    except (ValueError, OSError) as error:
        where = f"weight tensor {entry.name} is damaged in the push of version {push.version}"
        raise ValueError(f"{where}: {error}") from error


def _bytes_of(entry: TensorEntry, packed: Bytes) -> Bytes:
    return packed[entry.offset : entry.offset + entry.pushed_nbytes]


def _itemsize(entry: TensorEntry) -> int:
    return getattr(torch, entry.dtype).itemsize
