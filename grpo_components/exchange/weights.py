"""Weights on their way: torchtune to Hugging Face names, and buckets of bytes with checksums."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor
from torchtune.models import convert_weights
from torchtune.training.checkpointing import ModelType

_HEAD = "lm_head.weight"
_LAYER = re.compile(r"^(?:.*\.)?layers\.(\d+)\.")

_ROTARY_FAMILIES = (
    ModelType.LLAMA2,
    ModelType.LLAMA3,
    ModelType.LLAMA3_2,
    ModelType.MISTRAL,
    ModelType.GEMMA,
)
"""Families whose query and key rows torchtune stores in another order than Hugging Face."""

StateDict = dict[str, Tensor]


def layer_groups(names: Iterable[str]) -> list[list[str]]:
    """Split parameter names into units that convert on their own: a layer, or any other tensor.

    Args:
        names: torchtune's names.
    """
    groups: dict[str, list[str]] = defaultdict(list)
    for name in names:
        match = _LAYER.match(name)
        groups[f"layers.{match[1]}" if match else name].append(name)
    return list(groups.values())


def hf_converter(model_type: str, base_model_path: Path) -> Callable[[StateDict], StateDict]:
    """The function that renames (for some families also permutes) torchtune's weights.

    Args:
        model_type: torchtune's ModelType, e.g. QWEN2.
        base_model_path: folder of the checkpoint, with its config.json.

    Returns:
        A function of one unit of `layer_groups` (or the whole state dict).

    Raises:
        ValueError: for a family that torchtune 0.6.1 cannot convert back exactly.
    """
    kind = ModelType[model_type]
    hf_config = json.loads((base_model_path / "config.json").read_text())
    heads: Any = hf_config["num_attention_heads"]
    kv_heads: Any = hf_config.get("num_key_value_heads", heads)
    dim: Any = hf_config["hidden_size"]
    head_dim: Any = hf_config.get("head_dim")
    if kind == ModelType.QWEN2:
        from torchtune.models.qwen2._convert_weights import qwen2_tune_to_hf

        return partial(  # pyright: ignore[reportReturnType] -- torchtune says dict without types
            qwen2_tune_to_hf,
            num_heads=heads,
            num_kv_heads=kv_heads,
            dim=dim,
            tie_word_embeddings=bool(hf_config["tie_word_embeddings"]),
        )
    if kind in (ModelType.PHI3_MINI, ModelType.PHI4):
        from torchtune.models.phi3._convert_weights import phi3_tune_to_hf

        return phi3_tune_to_hf
    if kind in _ROTARY_FAMILIES:
        return partial(
            convert_weights.tune_to_hf,
            num_heads=heads,
            num_kv_heads=kv_heads,
            dim=dim,
            head_dim=head_dim,
        )
    raise ValueError(
        f"checkpointer.model_type: {model_type} cannot be converted to Hugging Face names exactly; "
        "allowed: LLAMA2, LLAMA3, LLAMA3_2, MISTRAL, GEMMA, PHI3_MINI, PHI4, QWEN2"
    )


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies in a bucket."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    checksum: int
    """xxh3 (64 bits) of name, dtype, shape and bytes."""


Manifest = tuple[TensorEntry, ...]


def checksum(name: str, dtype: str, shape: Sequence[int], raw: NDArray[np.uint8]) -> int:
    """The xxh3 (64 bits) of a tensor: bytes under another name or shape have another one."""
    digest = xxhash.xxh3_64(f"{name} {dtype} {list(shape)}".encode())
    digest.update(cast(Any, raw))
    return digest.intdigest()


def pack_bucket(tensors: Sequence[tuple[str, Tensor]]) -> tuple[Manifest, NDArray[np.uint8]]:
    """Copy named tensors into one flat array of bytes.

    numpy has no bfloat16, so that bytes travel, with dtype and shape beside them.

    Args:
        tensors: names and CPU tensors of any dtype.

    Returns:
        The manifest and the bytes [sum of nbytes] uint8.
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
    """Views of a bucket's tensors, each checked against its checksum first.

    Args:
        manifest: what `pack_bucket` returned with it.
        bucket: [nbytes] uint8, may be read-only.

    Raises:
        ValueError: naming the first tensor that is not as it was packed, or is there twice.
    """
    tensors: StateDict = {}
    for entry in manifest:
        raw = bucket[entry.offset : entry.offset + entry.nbytes]
        given = checksum(entry.name, entry.dtype, entry.shape, raw)
        if raw.nbytes != entry.nbytes or given != entry.checksum:
            raise ValueError(f"weight tensor {entry.name} is damaged: its checksum is another")
        if entry.name in tensors:
            raise ValueError(f"weight tensor {entry.name} came twice")
        flat = torch.frombuffer(raw, dtype=getattr(torch, entry.dtype), count=-1)
        tensors[entry.name] = flat.view(entry.shape)
    return tensors


def unpack_buckets(buckets: Iterable[tuple[Manifest, NDArray[np.uint8]]]) -> StateDict:
    """The tensors of all buckets of a snapshot; see `unpack_bucket`.

    Args:
        buckets: each trainer rank's part, in any order.

    Raises:
        ValueError: naming the first tensor that is damaged, or is there twice.
    """
    tensors: StateDict = {}
    for manifest, bucket in buckets:
        part = unpack_bucket(manifest, bucket)
        for name in sorted(part.keys() & tensors.keys()):
            raise ValueError(f"weight tensor {name} came twice")
        tensors |= part
    return tensors


def snapshot_checksum(manifests: Iterable[Manifest]) -> str:
    """One checksum of a whole snapshot, the same whatever the number of buckets.

    Args:
        manifests: of all the snapshot's buckets, in any order.

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
    """Names and shapes of a checkpoint's tensors, read from the safetensors headers.

    The copy that some checkpoints have of a tied head is left out: nobody loads it.

    Raises:
        ValueError: if the folder has no safetensors of that layout.
    """
    index = model_path / "model.safetensors.index.json"
    names = {"model.safetensors"}
    if index.is_file():  # beside it may lie copies in other formats
        names = set(json.loads(index.read_text())["weight_map"].values())
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(model_path / name for name in names):
        if not file.is_file():
            raise ValueError(f"base_model_path: no file {file}")
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 -- safe_open is no mapping
                if not name.endswith("rotary_emb.inv_freq"):  # a constant; nobody loads it
                    shapes[name] = tuple(tensors.get_slice(name).get_shape())
    config = model_path / "config.json"
    hf_config = json.loads(config.read_text()) if config.is_file() else {}
    if hf_config.get("tie_word_embeddings", hf_config.get("model_type") == "gemma"):
        shapes.pop(_HEAD, None)
    return shapes


def check_names_and_shapes(
    given: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]
) -> None:
    """Compare new weights with the model's, before anything is loaded.

    Args:
        given: shape by name of the new weights.
        expected: shape by name of the checkpoint that the engine was loaded from.

    Raises:
        ValueError: naming the first tensor that is missing, unknown or of another shape.
    """
    for name in sorted(set(expected) - set(given)):
        raise ValueError(f"weights: lack the tensor {name}")
    for name in sorted(set(given) - set(expected) - {_HEAD}):  # a tied head may be sent twice
        raise ValueError(f"weights: have an unknown tensor {name}")
    for name in sorted(set(given) & set(expected)):
        if tuple(given[name]) != tuple(expected[name]):
            raise ValueError(
                f"weights: {name} has shape {list(given[name])}, "
                f"the model's is {list(expected[name])}"
            )
