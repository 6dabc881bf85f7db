"""Packs weights into buckets of bytes with checksums and hashes; verifies received weights."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor

from grpo_components.errors import fail

_HEAD = "lm_head.weight"
_EMBEDDING = "embed_tokens.weight"
_HASHED_AT_ONCE = {"cpu": 2**17}
"""Device type -> elements hashed at a time: on a CPU as many as fit into its cache."""
StateDict = dict[str, Tensor]


@dataclass(frozen=True)
class TensorEntry:
    """Describes one tensor in a bucket: what it is, where its bytes are, and its checksum."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    checksum: int
    """xxh3 (64 bits) of name, dtype, shape and bytes."""
    base: int | None = None
    """Checksum of the earlier tensor that the delta applies to; None if this is not a delta."""
    delta_nbytes: int = 0
    """Size of the delta in bytes; `nbytes` is the size of the whole tensor."""
    values: int | None = None
    """`hash_values` of the whole tensor; None if `is_hashed` is false for the tensor."""

    @property
    def pushed_nbytes(self) -> int:
        """Number of bytes that the bucket holds for the tensor."""
        return self.nbytes if self.base is None else self.delta_nbytes


Manifest = tuple[TensorEntry, ...]


def is_hashed(device: str, dtype: torch.dtype) -> bool:
    """Whether weights are compared by `hash_values`: not float32 on a CPU, which engines repack."""
    return device != "cpu" or dtype != torch.float32


def hash_values(tensor: Tensor) -> Tensor:
    """Return the sum of the hashes of a tensor's elements as an int64 scalar on its device.

    Order does not matter: the hash of a fused tensor is the sum of its parts' hashes.
    """
    integer = {1: torch.uint8, 2: torch.int16}.get(tensor.dtype.itemsize, torch.int32)
    bits = tensor.detach().reshape(-1).view(integer)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for part in bits.split(_HASHED_AT_ONCE.get(tensor.device.type, 2**23)):
        mixed = part.to(torch.int32, copy=True)  # else small changes could cancel in the sum
        for factor in (-1640531535, -2048144777):  # odd, with bits that look random
            mixed *= factor
            mixed ^= mixed >> 15
        total += mixed.sum(dtype=torch.int64)
    return total


def hash_named(named: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
    """Return `hash_values` of each named tensor."""
    hashes = {name: hash_values(tensor) for name, tensor in named}
    return dict(zip(hashes, torch.stack([*hashes.values()]).tolist(), strict=True))


def join_shares(shares: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Combine workers' hashes of each tensor: add those of shards; keep one of equal copies."""
    joined: dict[str, int] = {}
    for name in shares[0]:
        found = [share[name] for share in shares]
        joined[name] = found[0] if len({*found}) == 1 else sum(found)
    return joined


def hash_layers(hashes: Mapping[str, int]) -> dict[str, int]:
    """Sum tensor hashes by layer; an output head equal to the embedding is left out."""
    layers: dict[str, int] = defaultdict(int)
    embedding = next((each for name, each in hashes.items() if name.endswith(_EMBEDDING)), None)
    for name, each in hashes.items():
        if not name.endswith(_HEAD) or each != embedding:
            number = re.search(r"\blayers\.(\d+)\.", name)
            layers[f"layer {number[1]}" if number else "the rest"] += each
    return {name: value % 2**64 for name, value in layers.items()}


def pushed_layers(manifests: Iterable[Manifest]) -> dict[str, int] | None:
    """Return the hash of each layer of a snapshot; None if any tensor has no hash."""
    entries = [entry for manifest in manifests for entry in manifest]
    hashes = {entry.name: entry.values for entry in entries if entry.values is not None}
    return hash_layers(hashes) if len(hashes) == len(entries) else None


def checksum(name: str, dtype: str, shape: Sequence[int], raw: NDArray[np.uint8]) -> int:
    """Compute the xxh3 (64 bits) of a tensor's name, dtype, shape and bytes."""
    digest = xxhash.xxh3_64(f"{name} {dtype} {list(shape)}".encode())
    digest.update(cast(Any, raw))
    return digest.intdigest()


class Bucket:
    """Packs named tensors, one after the other, into a flat buffer of bytes.

    The buffer holds bytes because numpy has no bfloat16; the manifest keeps dtypes and shapes.
    """

    def __init__(self, buffer: Tensor, free: Callable[[Tensor], None]) -> None:
        self._buffer, self._free = buffer, free
        self._entries: list[TensorEntry] = []
        self._values: list[Tensor | None] = []
        self._used = 0

    def add(self, name: str, tensor: Tensor, scale: float = 1.0) -> None:
        """Copy a tensor into the buffer; a copy from a GPU into pinned memory is not awaited.

        The manifest's hash is computed from the tensor times `scale`, which is what engines store.
        """
        raw = tensor.detach().contiguous().flatten().view(torch.uint8)
        dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        begin, self._used = self._used, self._used + raw.numel()
        self._buffer[begin : self._used].copy_(raw, non_blocking=True)
        compared = is_hashed(tensor.device.type, tensor.dtype)
        kept = tensor if scale == 1.0 else tensor * scale
        values = hash_values(kept).to("cpu", non_blocking=True) if compared else None
        self._values.append(values)
        self._entries.append(TensorEntry(name, dtype, shape, begin, raw.numel(), 0))

    def close(self) -> tuple[Manifest, NDArray[np.uint8]]:
        """Compute checksums; return manifest and bytes [nbytes]. All copies must have ended."""
        assert self._used == len(self._buffer)
        # Based on a memoryview: slices of the array would keep an array alive, but not this one.
        packed = np.frombuffer(memoryview(cast(Any, self._buffer.numpy())), np.uint8)
        weakref.finalize(packed, self._free, self._buffer).atexit = False

        def with_checksum(entry: TensorEntry, values: Tensor | None) -> TensorEntry:
            raw = packed[entry.offset : entry.offset + entry.nbytes]
            found = checksum(entry.name, entry.dtype, entry.shape, raw)
            return replace(entry, checksum=found, values=None if values is None else int(values))

        return tuple(map(with_checksum, self._entries, self._values)), packed


class BucketBuffers:
    """Makes buckets of one size, and reuses their buffers from push to push."""

    def __init__(self, nbytes: int, *, pinned: bool) -> None:
        self._nbytes, self._pinned = nbytes, pinned
        self._free: list[Tensor] = []

    def bucket(self) -> Bucket:
        """Return an empty bucket with a free buffer."""
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = torch.empty(self._nbytes, dtype=torch.uint8, pin_memory=self._pinned)
        return Bucket(buffer, self._free.append)


def pack_bucket(tensors: Sequence[tuple[str, Tensor]]) -> tuple[Manifest, NDArray[np.uint8]]:
    """Copy named tensors into one bucket; return its manifest and its bytes [nbytes]."""
    bucket = BucketBuffers(sum(tensor.nbytes for _, tensor in tensors), pinned=False).bucket()
    for name, tensor in tensors:
        bucket.add(name, tensor)
    return bucket.close()


def unpack_buckets(buckets: Iterable[tuple[Manifest, NDArray[np.uint8]]]) -> StateDict:
    """Return the tensors of a snapshot as views of its buckets, after verifying their checksums."""
    tensors: StateDict = {}
    for manifest, bucket in buckets:
        for entry in manifest:
            raw = bucket[entry.offset : entry.offset + entry.nbytes]
            given = checksum(entry.name, entry.dtype, entry.shape, raw)
            if raw.nbytes != entry.nbytes or given != entry.checksum:
                raise ValueError(f"weight tensor {entry.name} is damaged: checksum mismatch")
            if entry.name in tensors:
                raise ValueError(f"weight tensor {entry.name} appears twice")
            flat = torch.frombuffer(raw, dtype=getattr(torch, entry.dtype), count=-1)
            tensors[entry.name] = flat.view(entry.shape)
    return tensors


def snapshot_checksum(manifests: Iterable[Manifest]) -> str:
    """Compute one checksum of a whole snapshot, whatever the number of its buckets."""
    tensors = sorted(
        (entry.name, entry.dtype, entry.shape, entry.checksum)
        for manifest in manifests
        for entry in manifest
    )
    return xxhash.xxh3_64_hexdigest(json.dumps(tensors).encode())


def checkpoint_files(model_path: Path) -> list[Path]:
    """Return the files that hold a checkpoint's tensors."""
    index = model_path / "model.safetensors.index.json"
    names = {"model.safetensors"}
    if index.is_file():  # only these files: others may be copies in other formats
        names = set(json.loads(index.read_text())["weight_map"].values())
    files = sorted(model_path / name for name in names)
    for file in files:
        if not file.is_file():
            raise ValueError(f"base_model_path: no file {file}")
    return files


def checkpoint_shapes(model_path: Path) -> dict[str, tuple[int, ...]]:
    """Read names and shapes of a checkpoint's tensors from the safetensors headers.

    An output head tied to the embedding is left out: a stored copy of it is never loaded.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for file in checkpoint_files(model_path):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 -- safe_open is not a mapping
                if not name.endswith("rotary_emb.inv_freq"):  # a constant, never loaded
                    shapes[name] = tuple(tensors.get_slice(name).get_shape())
    config = model_path / "config.json"
    hf_config = json.loads(config.read_text()) if config.is_file() else {}
    if hf_config.get("tie_word_embeddings", hf_config.get("model_type") == "gemma"):
        shapes.pop(_HEAD, None)
    return shapes


def checkpoint_tensors(model_path: Path, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """Read the tensors of a checkpoint that have these names, one at a time."""
    wanted = set(names)
    for file in checkpoint_files(model_path):
        with safe_open(file, framework="pt") as tensors:
            for name in wanted.intersection(tensors.keys()):
                yield name, tensors.get_tensor(name)


def keeps_values(
    engine: Callable[[], dict[str, int]],
    device: str,
    loaded: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
) -> bool:
    """Check by layer hashes whether an engine stores its loaded tensors unchanged.

    If not, its weights can't be compared with pushed ones.
    """
    if not is_hashed(device, dtype):
        return False
    hashes = hash_named((name, tensor.to(dtype)) for name, tensor in loaded)
    keeps = engine() == hash_layers(hashes)
    if not keeps:
        logging.getLogger(__name__).warning(
            "the engine stores other values than it loads: pulls compare logprobs, and no weights"
        )
    return keeps


def check_output_head(model_path: Path) -> None:
    """Refuse a checkpoint whose output head contradicts config.json's `tie_word_embeddings`."""
    hf_config = json.loads((model_path / "config.json").read_text())
    tied = hf_config.get("tie_word_embeddings")
    parts: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        for file in checkpoint_files(model_path):
            tensors = stack.enter_context(safe_open(file, framework="pt"))
            parts |= {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
        head = parts.get(_HEAD)
        embedding = next((p for name, p in parts.items() if name.endswith(_EMBEDDING)), None)
        if tied is False and head is None:
            problem = f"{model_path} has no {_HEAD}, and its config.json tie_word_embeddings: false"
            fail("base_model_path", problem, "true there, or a file with the output head")
        if not tied or head is None or embedding is None:
            return
        rows = [(start, start + 4096) for start in range(0, head.get_shape()[0], 4096)]
        if head.get_shape() != embedding.get_shape() or any(
            bool((head[start:end] != embedding[start:end]).any()) for start, end in rows
        ):
            problem = f"{_HEAD} of {model_path} differs from the embedding, and its config.json has"
            fail("base_model_path", f"{problem} tie_word_embeddings: true", f"false, or no {_HEAD}")


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor, by name."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def check_names_and_shapes(
    given: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]
) -> None:
    """Check the names and shapes of new weights against the model's, before any is loaded."""
    for name in sorted(set(expected) - set(given)):
        raise ValueError(f"weights: missing tensor {name}")
    for name in sorted(set(given) - set(expected) - {_HEAD}):  # it may be sent although it is tied
        raise ValueError(f"weights: unknown tensor {name}")
    for name in sorted(set(given) & set(expected)):
        if tuple(given[name]) != tuple(expected[name]):
            raise ValueError(
                f"weights: {name} has shape {list(given[name])}, "
                f"the model's is {list(expected[name])}"
            )
