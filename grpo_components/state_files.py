"""Stores nested plain values, arrays and tensors in a JSON and an npz file, without pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

FORMAT = 1
"""Format number of a checkpoint's files; increased when older files can no longer be read."""
_MARK = "__is__"
"""Key that marks a JSON object as the encoded value of a type that JSON lacks."""


def write_state(folder: Path, name: str, state: Any) -> None:
    """Write nested values to `<name>.json`, and the arrays and tensors in them to `<name>.npz`."""
    arrays: dict[str, np.ndarray] = {}
    text = json.dumps(_encode(state, arrays, name))
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.npz").open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)  # pyright: ignore[reportArgumentType]
    with (folder / f"{name}.json").open("w", encoding="utf-8") as file:
        file.write(text)


def read_state(folder: Path, name: str) -> Any:
    """Return the state that `write_state` wrote, with the same types and bits."""
    text = (folder / f"{name}.json").read_text(encoding="utf-8")
    with np.load(folder / f"{name}.npz", allow_pickle=False) as arrays:
        return _decode(json.loads(text), arrays)


def check_storable(value: Any, name: str) -> None:
    """Raise a TypeError if `write_state` cannot store a value; the error names the part."""
    _encode(value, {}, name)


def _encode(value: Any, arrays: dict[str, np.ndarray], path: str) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [_encode(item, arrays, f"{path}[{i}]") for i, item in enumerate(value)]
    if type(value) is tuple:
        items = [_encode(item, arrays, f"{path}[{i}]") for i, item in enumerate(value)]
        return {_MARK: "tuple", "items": items}
    if isinstance(value, Mapping):
        items = [
            [_encode(key, arrays, f"{path}, a key"), _encode(item, arrays, f"{path}.{key}")]
            for key, item in value.items()
        ]
        if all(type(key) is str and key != _MARK for key in value):
            return {str(key): item for key, item in items}
        return {_MARK: "dict", "items": items}
    import torch

    if isinstance(value, torch.Tensor) and value.dtype is not torch.bfloat16:
        return _store("tensor", value.detach().cpu().numpy(), arrays)
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        return _store("array" if isinstance(value, np.ndarray) else "scalar", value, arrays)
    raise TypeError(f"{path}: a checkpoint cannot store type {type(value).__name__}")


def _store(kind: str, value: Any, arrays: dict[str, np.ndarray]) -> dict[str, str]:
    key = str(len(arrays))
    arrays[key] = np.asarray(value)
    return {_MARK: kind, "key": key}


def _decode(value: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    if isinstance(value, list):
        return [_decode(item, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_MARK)
    if kind is None:
        return {key: _decode(item, arrays) for key, item in value.items()}
    if kind == "tuple":
        return tuple(_decode(item, arrays) for item in value["items"])
    if kind == "dict":
        return {_decode(key, arrays): _decode(item, arrays) for key, item in value["items"]}
    array = arrays[value["key"]]
    if kind != "tensor":
        return {"array": array, "scalar": array[()]}[kind]
    import torch  # takes seconds, and the audit reads arrays only

    return torch.from_numpy(array)
