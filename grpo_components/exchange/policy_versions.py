"""Keeps each policy version of a run in a file, as what changed since an earlier one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from safetensors import safe_open

from grpo_components.exchange.byte_delta import apply, encode
from grpo_components.exchange.weight_deltas import Bucket, DeltaBucket, RebuiltWeights
from grpo_components.exchange.weights import (
    Manifest,
    StateDict,
    TensorDelta,
    TensorEntry,
    checkpoint_files,
    checksum,
    snapshot_checksum,
)
from grpo_components.whole_files import write_whole

FOLDER = "policy_versions"
"""Name of the folder of the versions, in the folder of a run."""
MAX_DEPTH = 64
"""Most deltas from the base model to a version: bounds the time to rebuild one."""
_HEAD = re.compile(rb"policy version, format 1, xxh3 ([0-9a-f]{32})\n")
_HEAD_BYTES = 64


class VersionId(NamedTuple):
    """Names a version: after a rollback, numbers come again with other weights."""

    attempt: int
    version: int

    def __str__(self) -> str:
        return f"version {self.version} of attempt {self.attempt}"


Tensors = dict[str, tuple[TensorEntry, NDArray[np.uint8]]]
"""Entry and bytes of each tensor, by its name."""


@dataclass(frozen=True)
class Header:
    """What a file says of its version before the bytes."""

    identity: VersionId
    checksum: str
    """Checksum of all tensors, as receipts have it."""
    base: VersionId | None
    """Version that the deltas change; None for the base model."""
    depth: int
    """Number of deltas from the base model to this version."""
    manifest: Manifest
    """Entries without `delta` have their whole bytes in the file: the base lacks the tensor."""
    payload_checksum: str = ""
    payload_offset: int = 0


class PolicyVersions:
    """Writes versions as they are published; a process's first one builds on the base model."""

    def __init__(self, folder: str | Path, base_model_path: str | Path) -> None:
        self._folder, self._base = Path(folder), _BaseModel(base_model_path)
        self._last: tuple[VersionId, int, Tensors] | None = None
        """Identity, depth and tensors of the version that was kept last."""

    def keep(self, attempt: int, version: int, pushes: Iterable[Bucket | DeltaBucket]) -> int:
        """Write a version, unless the same one is there already."""
        identity, tensors = VersionId(attempt, version), self._whole(version, list(pushes))
        path, named = _path(self._folder, identity), _checksum_of(tensors)
        if path.exists():  # an earlier process of this role wrote it
            header = _read_header(path)
            if header.checksum != named:
                raise ValueError(f"{path} has other weights, of checksum {header.checksum}")
            self._last = identity, header.depth, tensors
            return path.stat().st_size
        last, base, depth, before = self._last, None, 1, None
        if last is not None and last[0].attempt == attempt and last[1] < MAX_DEPTH:
            base, depth, before = last[0], last[1] + 1, last[2]
        entries, parts = [], list[NDArray[np.uint8]]()
        for entry, raw in tensors.values():
            old = self._base.tensor(entry) if before is None else before.get(entry.name)
            delta = None
            if old is not None and _layout(old[0]) == _layout(entry):
                changed = _delta(entry, raw, *old)
                delta = TensorDelta(old[0].checksum, len(changed))
                raw = changed
            entries.append(replace(entry, delta=delta))
            parts.append(raw)
        payload = b"".join(part.tobytes() for part in parts)
        digest = xxhash.xxh3_128_hexdigest(payload)
        content = _head(Header(identity, named, base, depth, tuple(entries), digest)) + payload
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content, durable=True)
        self._last = identity, depth, tensors
        return len(content)

    def _whole(self, version: int, pushes: list[Bucket | DeltaBucket]) -> Tensors:
        deltas = [push for push in pushes if isinstance(push, DeltaBucket)]
        buckets = cast("list[Bucket]", pushes)
        if deltas:
            rebuilt = RebuiltWeights()
            if self._last is not None:  # copied: it changes them in place
                last = self._last[2].values()
                rebuilt.keep([((entry,), raw.copy()) for entry, raw in last])
            buckets = rebuilt.rebuild(version, deltas)
        return {
            entry.name: (
                replace(entry, offset=0, delta=None),
                raw[entry.offset : entry.offset + entry.nbytes],
            )
            for manifest, raw in buckets
            for entry in manifest
        }


class KeptVersions:
    """Rebuilds the versions of a run; the next one in turn is one delta away."""

    def __init__(self, folder: str | Path, base_model_path: str | Path) -> None:
        self._folder, self._base = Path(folder), _BaseModel(base_model_path)
        self._held: tuple[VersionId | None, Tensors] = None, {}
        """The version that was rebuilt last, or None for the base model; and its tensors."""

    def identities(self) -> list[VersionId]:
        """Return all versions that are kept, sorted."""
        found = []
        for path in self._folder.glob("attempt_*/version_*"):
            numbers = [part.partition("_")[2] for part in path.parts[-2:]]
            if all(number.isdigit() for number in numbers):
                found.append(VersionId(*map(int, numbers)))
        return sorted(found)

    def header(self, identity: VersionId) -> Header:
        """Return what a version's file says of it; its bytes are not checked."""
        return _read_header(_path(self._folder, identity))

    def bucket(self, identity: VersionId) -> Bucket:
        """Rebuild a version as one bucket, in memory of its own."""
        tensors, entries, offset = self._rebuild(identity).values(), list[TensorEntry](), 0
        for entry, _ in tensors:
            entries.append(replace(entry, offset=offset, delta=None))
            offset += entry.nbytes
        return tuple(entries), np.concatenate([raw for _, raw in tensors])

    def state_dict(self, identity: VersionId) -> StateDict:
        """Rebuild a version; the tensors are valid until the next call."""
        rebuilt = self._rebuild(identity)
        return {name: _tensor(entry, raw) for name, (entry, raw) in rebuilt.items()}

    def base_state_dict(self) -> StateDict:
        """Return version 0 as the run had it: the base model, checked, in the run's dtype."""
        for identity in self.identities():
            header = self.header(identity)
            entries = [entry for entry in header.manifest if entry.delta is not None]
            if header.base is None and entries:
                return {e.name: _tensor(e, self._base_bytes(e, identity)) for e in entries}
        raise ValueError(f"{self._folder}: no version here builds on the base model's tensors")

    def base_model(self) -> StateDict:
        """Return all tensors of the base model in float32, unchecked."""
        return {name: self._base.read(name).float() for name in self._base.names()}

    def _rebuild(self, identity: VersionId) -> Tensors:
        way, at = list[VersionId](), identity
        while at is not None and at != self._held[0]:
            way.append(at)
            at = self.header(at).base
            if len(way) > MAX_DEPTH:
                raise ValueError(f"{_path(self._folder, identity)}: builds on too many others")
        tensors, self._held = self._held[1] if at is not None else {}, (None, {})
        for each in reversed(way):
            header, payload = self._read(each)
            tensors = self._apply(header, payload, tensors)
        header = self.header(identity)
        for entry, raw in tensors.values():
            if checksum(entry.name, entry.dtype, entry.shape, raw) != entry.checksum:
                path = _path(self._folder, identity)
                raise ValueError(f"{path}: weight tensor {entry.name} has another checksum")
        if _checksum_of(tensors) != header.checksum:
            raise ValueError(f"{_path(self._folder, identity)}: the tensors are not {identity}'s")
        self._held = identity, tensors
        return tensors

    def _apply(self, header: Header, payload: NDArray[np.uint8], base: Tensors) -> Tensors:
        tensors, at = Tensors(), 0
        for entry in header.manifest:
            part = payload[at : at + entry.pushed_nbytes]
            at += entry.pushed_nbytes
            where = f"{_path(self._folder, header.identity)}: weight tensor {entry.name}"
            if entry.delta is None:
                raw = np.array(part)
            elif header.base is None:
                raw = self._base_bytes(entry, header.identity)
            else:
                old, raw = base[entry.name]
                if old.checksum != entry.delta.base:
                    raise ValueError(f"{where} builds on other weights than {header.base}")
            if entry.delta is not None:
                try:
                    apply(part, raw, _itemsize(entry))
                except ValueError as error:
                    raise ValueError(f"{where} is damaged: {error}") from error
            tensors[entry.name] = replace(entry, offset=0, delta=None), raw
        return tensors

    def _base_bytes(self, entry: TensorEntry, identity: VersionId) -> NDArray[np.uint8]:
        assert entry.delta is not None
        found = self._base.tensor(entry)
        if found is None or found[0].checksum != entry.delta.base:
            problem = f"weight tensor {entry.name} is not the one that {identity} builds on"
            raise ValueError(f"base_model_path: {self._base.path}: {problem}")
        return found[1].copy()

    def _read(self, identity: VersionId) -> tuple[Header, NDArray[np.uint8]]:
        path = _path(self._folder, identity)
        header = _read_header(path)
        content = np.fromfile(path, np.uint8)
        payload = content[header.payload_offset :]
        if xxhash.xxh3_128_hexdigest(cast(Any, payload)) != header.payload_checksum:
            raise ValueError(f"{path} ({identity}) is damaged: checksum mismatch")
        return header, payload


class _BaseModel:
    """Reads tensors of the base model in the dtype in which a run exports them."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._files: dict[str, Path] | None = None

    def names(self) -> Mapping[str, Path]:
        """Return the file of each tensor, by its name."""
        if self._files is None:
            self._files = {}
            for file in checkpoint_files(self.path):
                with safe_open(file, framework="pt") as tensors:
                    self._files |= dict.fromkeys(tensors.keys(), file)
        return self._files

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor as the file has it."""
        with safe_open(self.names()[name], framework="pt") as tensors:
            return tensors.get_tensor(name)

    def tensor(self, like: TensorEntry) -> tuple[TensorEntry, NDArray[np.uint8]] | None:
        """Return a tensor by its name, with its checksum; None if the model has none like it."""
        if like.name not in self.names():
            return None
        found = self.read(like.name).to(getattr(torch, like.dtype)).contiguous()
        if tuple(found.shape) != tuple(like.shape):
            return None
        raw = found.flatten().view(torch.uint8).numpy()
        number = checksum(like.name, like.dtype, like.shape, raw)
        return replace(like, offset=0, checksum=number, delta=None), raw


def _delta(
    entry: TensorEntry, raw: NDArray[np.uint8], old: TensorEntry, before: NDArray[np.uint8]
) -> NDArray[np.uint8]:
    if old.checksum == entry.checksum:
        return np.empty(0, np.uint8)
    return encode(raw, before, _itemsize(entry))


def _tensor(entry: TensorEntry, raw: NDArray[np.uint8]) -> torch.Tensor:
    return torch.frombuffer(raw, dtype=getattr(torch, entry.dtype)).view(entry.shape)


def _path(folder: Path, identity: VersionId) -> Path:
    return folder / f"attempt_{identity.attempt}" / f"version_{identity.version}"


def _layout(entry: TensorEntry) -> tuple[str, tuple[int, ...]]:
    return entry.dtype, tuple(entry.shape)


def _itemsize(entry: TensorEntry) -> int:
    return getattr(torch, entry.dtype).itemsize


def _checksum_of(tensors: Tensors) -> str:
    return snapshot_checksum([tuple(entry for entry, _ in tensors.values())])


def _head(header: Header) -> bytes:
    described = {
        **header.identity._asdict(),
        "checksum": header.checksum,
        "base": header.base,
        "depth": header.depth,
        "payload": header.payload_checksum,
        "tensors": [
            (*_described(entry), entry.delta and (entry.delta.base, entry.delta.nbytes))
            for entry in header.manifest
        ],
    }
    line = json.dumps(described).encode()
    return b"policy version, format 1, xxh3 %s\n%s\n" % (_digest(line), line)


def _described(entry: TensorEntry) -> tuple[Any, ...]:
    return entry.name, entry.dtype, entry.shape, entry.nbytes, entry.checksum


def _digest(line: bytes) -> bytes:
    return xxhash.xxh3_128_hexdigest(line).encode()


def _read_header(path: Path) -> Header:
    attempt, number = (part.partition("_")[2] for part in path.parts[-2:])
    if not path.is_file():
        raise ValueError(f"no file {path}: version {number} of attempt {attempt} is not kept")
    with path.open("rb") as file:
        head, line = file.readline(_HEAD_BYTES), file.readline().removesuffix(b"\n")
    match = _HEAD.fullmatch(head)
    if not match or match[1] != _digest(line):
        raise ValueError(f"{path} (version {number} of attempt {attempt}) is damaged: no header")
    found = json.loads(line)
    if (found["attempt"], found["version"]) != (int(attempt), int(number)):
        named = VersionId(found["attempt"], found["version"])
        raise ValueError(f"{path} has {named}")
    entries = [
        TensorEntry(name, dtype, tuple(shape), 0, nbytes, number, delta and TensorDelta(*delta))
        for name, dtype, shape, nbytes, number, delta in found["tensors"]
    ]
    return Header(
        VersionId(found["attempt"], found["version"]),
        found["checksum"],
        found["base"] and VersionId(*found["base"]),
        found["depth"],
        tuple(entries),
        found["payload"],
        len(head) + len(line) + 1,
    )
