"""Packs weights into buckets of bytes with checksums, and checks what arrives."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor

_HEAD = "lm_head.weight"
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


Manifest = tuple[TensorEntry, ...]


def checksum(name: str, dtype: str, shape: Sequence[int], raw: NDArray[np.uint8]) -> int:
    """Compute the xxh3 (64 bits) of a tensor's name, dtype, shape and bytes."""
    digest = xxhash.xxh3_64(f"{name} {dtype} {list(shape)}".encode())
    digest.update(cast(Any, raw))
    return digest.intdigest()


def pack_bucket(tensors: Sequence[tuple[str, Tensor]]) -> tuple[Manifest, NDArray[np.uint8]]:
    """Copy named tensors into one flat array of bytes.

    The array holds bytes because numpy has no bfloat16; the manifest keeps dtypes and shapes.

    Args:
        tensors: names and tensors, on the CPU and of any dtype.

    Returns:
        The manifest, and the bytes [sum of nbytes] uint8.
    """
    entries, parts, offset = [], [], 0
    for name, tensor in tensors:
        raw = tensor.detach().contiguous().flatten().view(torch.uint8).numpy()
        dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        entries.append(
            TensorEntry(
                name=name,
                dtype=dtype,
                shape=shape,
                offset=offset,
                nbytes=raw.nbytes,
                checksum=checksum(name, dtype, shape, raw),
            )
        )
        parts.append(raw)
        offset += raw.nbytes
    return tuple(entries), np.concatenate(parts) if parts else np.empty(0, np.uint8)


def unpack_bucket(manifest: Manifest, bucket: NDArray[np.uint8]) -> StateDict:
    """Return the tensors of a bucket as views of its bytes, after verifying their checksums.

    Args:
        manifest: manifest that `pack_bucket` returned with the bucket.
        bucket: [nbytes] uint8; may be read-only.

    Raises:
        ValueError: a tensor has a wrong checksum or appears twice; the error names that tensor.
    """
    tensors: StateDict = {}
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


def unpack_buckets(buckets: Iterable[tuple[Manifest, NDArray[np.uint8]]]) -> StateDict:
    """Return the tensors of a snapshot as views of its buckets, after verifying their checksums.

    Args:
        buckets: each trainer rank's manifest and bytes, in any order.

    Raises:
        ValueError: a tensor has a wrong checksum or appears twice; the error names that tensor.
    """
    tensors: StateDict = {}
    for manifest, bucket in buckets:
        part = unpack_bucket(manifest, bucket)
        for name in sorted(part.keys() & tensors.keys()):
            raise ValueError(f"weight tensor {name} appears twice")
        tensors |= part
    return tensors


def snapshot_checksum(manifests: Iterable[Manifest]) -> str:
    """Compute one checksum of a whole snapshot, whatever the number of its buckets.

    Args:
        manifests: manifests of all buckets of the snapshot, in any order.

    Returns:
        xxh3 (64 bits, hexadecimal) over name, dtype, shape and checksum of every tensor.
    """
    tensors = sorted(
        (entry.name, entry.dtype, entry.shape, entry.checksum)
        for manifest in manifests
        for entry in manifest
    )
    return xxhash.xxh3_64_hexdigest(json.dumps(tensors).encode())


def checkpoint_shapes(model_path: Path) -> dict[str, tuple[int, ...]]:
    """Read names and shapes of a checkpoint's tensors from the safetensors headers.

    An output head tied to the embedding is left out: a stored copy of it is never loaded.

    Args:
        model_path: folder with `model.safetensors`, or with several files and their index.

    Raises:
        ValueError: a safetensors file is missing.
    """
    index = model_path / "model.safetensors.index.json"
    names = {"model.safetensors"}
    if index.is_file():  # only these files: others may be copies in other formats
        names = set(json.loads(index.read_text())["weight_map"].values())
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(model_path / name for name in names):
        if not file.is_file():
            raise ValueError(f"base_model_path: no file {file}")
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 -- safe_open is not a mapping
                if not name.endswith("rotary_emb.inv_freq"):  # a constant, never loaded
                    shapes[name] = tuple(tensors.get_slice(name).get_shape())
    config = model_path / "config.json"
    hf_config = json.loads(config.read_text()) if config.is_file() else {}
    if hf_config.get("tie_word_embeddings", hf_config.get("model_type") == "gemma"):
        shapes.pop(_HEAD, None)
    return shapes


def check_names_and_shapes(
    given: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]
) -> None:
    """Check the names and shapes of new weights against the model's, before any is loaded.

    Args:
        given: shape of each new tensor, by name.
        expected: shape of each tensor of the checkpoint that the engine was loaded from, by name.

    Raises:
        ValueError: a tensor is missing, unknown or has another shape; the error names it.
    """
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
