"""The record that flows through a run, one response to one prompt, and its packed form."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

FinishReason = Literal["stop", "length", "abort", "error"]

PackedTrajectories = dict[str, Any]
"""Trajectories as flat arrays plus lengths: 30 times cheaper to pickle than a list of records."""

_RAGGED: dict[str, type[np.generic]] = {
    "prompt_ids": np.int64,
    "response_ids": np.int64,
    "response_mask": np.bool_,
    "generator_logprobs": np.float32,
    "token_versions": np.int32,
    "reference_logprobs": np.float32,
}
_SCALAR: dict[str, type[np.generic]] = {
    "prompt_index": np.int64,
    "epoch": np.int64,
    "group_id": np.int64,
    "attempt": np.int64,
    "temperature": np.float64,
    "reward": np.float64,
    "success": np.bool_,
    "advantage": np.float32,
}
_OBJECTS = ("finish_reason", "reward_terms", "error")


@dataclass
class Trajectory:
    """One response to one prompt, unpadded; filled from left to right, never overwritten.

    A *group* is the list of the `group_size` trajectories that answer one prompt.
    """

    prompt_ids: NDArray[np.int64]
    """[P] tokens of the prompt, as the environment made them."""
    response_ids: NDArray[np.int64]
    """[R] tokens after the prompt."""
    response_mask: NDArray[np.bool_]
    """[R] True where the policy sampled the token, False for tool or environment tokens."""
    generator_logprobs: NDArray[np.float32]
    """[R] natural logs, of the sampling distribution (temperature applied)."""
    token_versions: NDArray[np.int32]
    """[R] policy version that sampled each token."""
    prompt_index: int
    """Row of the data set."""
    epoch: int
    """Pass over the data set, from 0."""
    group_id: int
    """Number of the group in the order of admission, from 0."""
    attempt: int
    """Attempt of the run: 0, plus 1 for each resume or rollback."""
    finish_reason: FinishReason
    temperature: float = 1.0
    """Logits were divided by it when sampling."""
    reward: float = float("nan")
    """Weighted sum of the reward terms; NaN until scored, and if `finish_reason` is error."""
    reward_terms: dict[str, float] = field(default_factory=dict)
    """Unweighted rewards by their names in the config; `reward_model` is the learned one."""
    success: bool = False
    """Whether the reward marked `is_success` is at its maximum."""
    error: str | None = None
    """Error message if `finish_reason` is error."""
    reference_logprobs: NDArray[np.float32] | None = None
    """[R] natural logs of the frozen reference; None without a reference."""
    advantage: float = float("nan")
    """Set when the batch is formed."""

    def check(self) -> None:
        """Assert the record's invariants: equal lengths, finite logprobs, known versions.

        Raises:
            AssertionError: an invariant is broken; names the field.
        """
        length = len(self.response_ids)
        assert len(self.prompt_ids) > 0, "prompt_ids: empty"
        for name in ("response_mask", "generator_logprobs", "token_versions"):
            assert len(getattr(self, name)) == length, f"{name}: expected {length} entries"
        sampled = self.response_mask
        assert np.isfinite(self.generator_logprobs[sampled]).all(), "generator_logprobs: not finite"
        assert (self.token_versions[sampled] >= 0).all(), "token_versions: missing"
        if self.reference_logprobs is not None:
            expected = f"reference_logprobs: expected {length} entries"
            assert len(self.reference_logprobs) == length, expected

    @property
    def failed(self) -> bool:
        """Whether the reward or environment failed, so that the sample must not be trained."""
        return self.finish_reason == "error"

    @property
    def oldest_version(self) -> int | None:
        """The oldest policy version among the sampled tokens; None without any."""
        versions = self.token_versions[self.response_mask]
        return int(versions.min()) if len(versions) else None


def pack(trajectories: Sequence[Trajectory]) -> PackedTrajectories:
    """Turn records into flat arrays plus lengths.

    Args:
        trajectories: any number of records; all have `reference_logprobs`, or none has.

    Returns:
        One entry per field: `(flat, lengths)` for [P] and [R] fields, an array for scalars, a list
        for the rest.
    """
    packed: PackedTrajectories = {}
    for name, dtype in _RAGGED.items():
        values = [getattr(t, name) for t in trajectories]
        if _all_missing(values, name):
            packed[name] = None
            continue
        flat = np.concatenate([np.asarray(v, dtype=dtype) for v in values] or [np.empty(0, dtype)])
        packed[name] = (flat, np.array([len(v) for v in values], dtype=np.int64))
    for name, dtype in _SCALAR.items():
        packed[name] = np.array([getattr(t, name) for t in trajectories], dtype=dtype)
    for name in _OBJECTS:
        packed[name] = [getattr(t, name) for t in trajectories]
    return packed


def split(packed: PackedTrajectories, name: str) -> list[NDArray[Any]]:
    """Cut one [P] or [R] field into its trajectories.

    Args:
        packed: what `pack` returned.
        name: of the field; `reference_logprobs` only where they were added.

    Returns:
        One array per trajectory, a view of the flat one.
    """
    flat, lengths = packed[name]
    sizes = lengths.tolist()
    ends = itertools.accumulate(sizes)
    return [flat[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def unpack(packed: PackedTrajectories) -> list[Trajectory]:
    """Turn flat arrays back into records; the inverse of `pack`.

    Args:
        packed: what `pack` returned.

    Returns:
        The records, in order. Their arrays are views of the flat ones.
    """
    size = len(packed["group_id"])
    columns: dict[str, list[Any]] = {
        name: [None] * size if packed[name] is None else split(packed, name) for name in _RAGGED
    }
    for name in _SCALAR:
        columns[name] = packed[name].tolist()
    for name in _OBJECTS:
        columns[name] = packed[name]
    return [Trajectory(**{name: columns[name][i] for name in columns}) for i in range(size)]


class TokenSequence(NamedTuple):
    """What a forward pass reads of a trajectory."""

    prompt_ids: NDArray[np.int64]
    """[P]"""
    response_ids: NDArray[np.int64]
    """[R]"""
    temperature: float
    """Logits are divided by it."""


def token_sequences(packed: PackedTrajectories) -> list[TokenSequence]:
    """View packed trajectories as token sequences, in order.

    Args:
        packed: what `pack` returned.
    """
    columns = (split(packed, "prompt_ids"), split(packed, "response_ids"))
    parts = zip(*columns, packed["temperature"].tolist(), strict=True)
    return [TokenSequence(*part) for part in parts]


def concatenate(groups: Iterable[PackedTrajectories]) -> PackedTrajectories:
    """Join packed groups into one packed batch, in the order given.

    Args:
        groups: any number of them; all have `reference_logprobs`, or none has. Groups without
            trajectories are skipped.

    Returns:
        The same as `pack` of all their trajectories, bit for bit, in new arrays.
    """
    parts = [group for group in groups if len(group["group_id"])]
    if not parts:
        return pack([])
    joined: PackedTrajectories = {}
    for name in _RAGGED:
        columns = [part[name] for part in parts]
        if _all_missing(columns, name):
            joined[name] = None
            continue
        flats, lengths = zip(*columns, strict=True)
        joined[name] = (np.concatenate(flats), np.concatenate(lengths))
    for name in _SCALAR:
        joined[name] = np.concatenate([part[name] for part in parts])
    for name in _OBJECTS:
        joined[name] = [value for part in parts for value in part[name]]
    return joined


def _all_missing(values: Sequence[Any], name: str) -> bool:
    missing = [value is None for value in values]
    assert all(missing) or not any(missing), f"{name}: set on some trajectories only"
    return any(missing)


def batch_hash(packed: PackedTrajectories) -> str:
    """Compute a fingerprint of a batch: equal only for equal trajectories in the same order.

    Args:
        packed: what `pack` or `concatenate` returned.

    Returns:
        xxh3 (128 bits, hexadecimal) over all fields but two: `attempt`, which a resume increments,
        and `error`, whose text may name a process and is not trained on.
    """
    digest = xxhash.xxh3_128()

    def update(value: Any) -> None:
        if isinstance(value, np.ndarray):
            digest.update(f"{value.dtype}{value.shape}".encode())
            digest.update(np.ascontiguousarray(value).tobytes())
        elif isinstance(value, tuple):  # (flat, lengths)
            for part in value:
                update(part)
        else:
            digest.update(json.dumps(value, sort_keys=True, default=float).encode())

    for name in sorted(packed.keys() - {"attempt", "error"}):
        digest.update(name.encode())
        update(packed[name])
    return digest.hexdigest()


@dataclass(frozen=True)
class GroupSummary:
    """What the driver needs to know of a group, without its tokens."""

    group_id: int
    prompt_index: int
    rewards: list[float]
    """[G] NaN for failed samples."""
    successes: list[bool]
    response_tokens: list[int]
    """[G] sampled tokens of each response."""
    response_lengths: list[int]
    """[G] all tokens of each response, also the environment's; the length limit counts these."""
    oldest_version: int
    """-1 if nothing was sampled, for example because the environment failed."""
    newest_version: int
    finish_reasons: list[str]
    errors: list[str]
    """Messages of the failed samples."""


def summarize(group: PackedTrajectories) -> GroupSummary:
    """Reduce one group to the numbers that scheduling, advantages and metrics need.

    Args:
        group: packed trajectories of one prompt. At least one token was sampled, or all failed.
    """
    masks, group_id = split(group, "response_mask"), int(group["group_id"][0])
    versions = group["token_versions"][0][group["response_mask"][0]]
    if not len(versions):
        failed = all(reason == "error" for reason in group["finish_reason"])
        assert failed, f"group {group_id}: no sampled token"
        versions = np.array([-1])
    return GroupSummary(
        group_id=group_id,
        prompt_index=int(group["prompt_index"][0]),
        rewards=group["reward"].tolist(),
        successes=group["success"].tolist(),
        response_tokens=[int(mask.sum()) for mask in masks],
        response_lengths=[len(mask) for mask in masks],
        oldest_version=int(versions.min()),
        newest_version=int(versions.max()),
        finish_reasons=list(group["finish_reason"]),
        errors=[error for error in group["error"] if error is not None],
    )
