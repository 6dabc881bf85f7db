"""Defines fields and types of each record in receipts.jsonl, which docs/receipts.md explains."""

from __future__ import annotations

import json
import re
from typing import Any

LARGEST = 2**53
"""Largest number allowed in a record; the smallest is 0."""
_NUMBER = re.compile("0|[1-9][0-9]*")
"""The one allowed spelling of a number as a key, so that two keys are never the same number."""

_AMOUNT = {"count": int, "response_tokens_mean": (float, None)}
_GROUPS = {
    "issued": int,
    "generated": _AMOUNT,
    "filtered": _AMOUNT,
    "dropped": {str: _AMOUNT},
    "trained": _AMOUNT,
}
_EVENT = (
    {"issued": int, "prompt_index": int, "epoch": int},
    {"generated": int, "response_tokens": float},
    {"restarted": int},
    {"dropped": int, "reason": str, "reissue": bool},
    {"trained": int},
)
_SHARED = {
    "record": str,
    "attempt": int,
    "step": int,
    "policy_version": int,
    "generators": {str: {"version": int, "checksum": (str, None)}},
    "acknowledged": [{"generator": str, "version": int, "checksum": str, "published": str}],
    "groups": _GROUPS,
    "events": [_EVENT],
}
_START = {
    "record": str,
    "format": int,
    "attempt": int,
    "steps_done": int,
    "policy_version": int,
    "num_steps": int,
    "max_staleness": int,
    "groups_per_step": int,
    "group_size": int,
}
_SHAPES = {
    "start": (_START | {"run": str, "incarnation": str}, _START),  # older versions have no ids
    "step": {
        **_SHARED,
        "trained_from": int,
        "token_versions": {int: int},
        "max_staleness": (int, None),
        "correction_mass": (float, None),
        "batch_hash": str,
        "trained": [{"prompt_index": int, "epoch": int, "group_id": int}],
    },
    "end": {
        **_SHARED,
        "finished": bool,
        "living": [{"group_id": int, "prompt_index": int, "epoch": int, "state": str}],
        "waiting": [{"prompt_index": int, "epoch": int}],
    },
}
"""Kind of record -> its shape. A shape is a type, a tuple of alternative shapes, [shape of each
item], {type of the keys: shape of the values}, or {field: shape} with all fields."""


def mismatch(record: Any) -> str | None:
    """Find out how a record differs from the shape of its kind.

    Args:
        record: JSON value of a line of receipts.jsonl, without its hash.

    Returns:
        The first difference; None if there is none.
    """
    kind = record.get("record") if isinstance(record, dict) else None
    if not isinstance(kind, str) or kind not in _SHAPES:
        return f"record: {json.dumps(kind)[:40]} given; allowed: {', '.join(_SHAPES)}"
    return _mismatch(record, _SHAPES[kind], "record")


def _mismatch(value: Any, shape: Any, path: str) -> str | None:
    """Return the first difference between a JSON value and a shape (see `_SHAPES`), or None."""
    if isinstance(shape, tuple):
        found = [_mismatch(value, each, path) for each in shape]
        return None if None in found else found[0]
    if isinstance(shape, list) and isinstance(value, list):
        found = (_mismatch(item, shape[0], f"{path}[{i}]") for i, item in enumerate(value))
        return next((problem for problem in found if problem), None)
    if isinstance(shape, dict) and isinstance(value, dict):
        keys = next(iter(shape))
        if keys is int and (wrong := [key for key in value if not _is_number(key)]):
            return f"{path} has a key that is not a number: {json.dumps(wrong[0])[:40]}"
        if isinstance(keys, type):
            shape = dict.fromkeys(value, shape[keys])
        if value.keys() != shape.keys():
            return f"{path} has missing or unknown fields: " + ", ".join(
                sorted(value.keys() ^ shape.keys())
            )
        found = (_mismatch(value[name], shape[name], f"{path}.{name}") for name in shape)
        return next((problem for problem in found if problem), None)
    if shape is None and value is None:
        return None
    if isinstance(shape, type):
        kinds = (int, float) if shape is float else (shape,)
        if type(value) in kinds and (shape not in (int, float) or 0 <= value <= LARGEST):
            return None
    return f"{path} is {json.dumps(value)[:40]}"


def _is_number(key: str) -> bool:
    return bool(_NUMBER.fullmatch(key)) and len(key) <= len(str(LARGEST)) and int(key) <= LARGEST
