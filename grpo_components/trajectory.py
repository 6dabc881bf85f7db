"""Defines the trajectory, a record of one response to one prompt, and its packed form."""

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
    "teacher_logprobs": np.float32,
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
    """One response to one prompt, unpadded.

    Later stages of a run fill in later fields, and never overwrite earlier ones. A *group* is the
    list of the `group_size` trajectories that answer one prompt. P is the number of tokens of the
    prompt, R that of the response.
    """

    prompt_ids: NDArray[np.int64]
    """[P] token ids of the prompt, as the environment made them."""
    response_ids: NDArray[np.int64]
    """[R] token ids after the prompt."""
    response_mask: NDArray[np.bool_]
    """[R] True where the policy sampled the token, False for tool or environment tokens."""
    generator_logprobs: NDArray[np.float32]
    """[R] natural log probabilities under the sampling distribution (temperature applied)."""
    token_versions: NDArray[np.int32]
    """[R] policy version that sampled each token."""
    prompt_index: int
    """Row of the data set."""
    epoch: int
    """Pass over the data set, from 0."""
    group_id: int
    """Number of the group, from 0, in the order in which the ledger admitted the groups."""
    attempt: int
    """Attempt of the run: 0, plus 1 for each resume or rollback."""
    finish_reason: FinishReason
    temperature: float = 1.0
    """Sampling temperature, by which logits were divided."""
    reward: float = float("nan")
    """Weighted sum of the reward terms; NaN until scored, and if `finish_reason` is error."""
    reward_terms: dict[str, float] = field(default_factory=dict)
    """Unweighted rewards by their names in the config; `reward_model` is the learned one."""
    success: bool = False
    """Whether the reward marked `is_success` is at its maximum."""
    error: str | None = None
    """Error message if `finish_reason` is error."""
    reference_logprobs: NDArray[np.float32] | None = None
    """[R] natural log probabilities under the frozen reference; None without a reference."""
    teacher_logprobs: NDArray[np.float32] | None = None
    """[R] natural log probabilities under the frozen teacher; None without a teacher."""
    advantage: float = float("nan")
    """Advantage of the response; NaN until its batch is formed."""

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
        for name in ("reference_logprobs", "teacher_logprobs"):
            values = getattr(self, name)
            assert values is None or len(values) == length, f"{name}: expected {length} entries"

    @property
    def failed(self) -> bool:
        """Whether the reward or environment failed, so that the sample must not be trained on."""
        return self.finish_reason == "error"

    @property
    def oldest_version(self) -> int | None:
        """Oldest policy version among the sampled tokens; None if no token was sampled."""
        versions = self.token_versions[self.response_mask]
        return int(versions.min()) if len(versions) else None


def pack(trajectories: Sequence[Trajectory]) -> PackedTrajectories:
    """Turn records into flat arrays plus lengths.

    Args:
        trajectories: any number of records, all with or all without `reference_logprobs`, and
            likewise `teacher_logprobs`.

    Returns:
        A dictionary by field: `(flat, lengths)` for [P] and [R] fields, an array for scalars, a
        list for the rest.
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
    """Cut one [P] or [R] field into one array per trajectory.

    Args:
        packed: packed trajectories, from `pack`.
        name: name of the field; logprobs of reference or teacher only if there are any.

    Returns:
        The arrays in order, as views of the flat one.
    """
    flat, lengths = packed[name]
    sizes = lengths.tolist()
    ends = itertools.accumulate(sizes)
    return [flat[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def unpack(packed: PackedTrajectories) -> list[Trajectory]:
    """Turn flat arrays back into records; the inverse of `pack`.

    Args:
        packed: packed trajectories, from `pack`.

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
    """The part of a trajectory that a forward pass reads."""

    prompt_ids: NDArray[np.int64]
    """[P] token ids of the prompt."""
    response_ids: NDArray[np.int64]
    """[R] token ids after the prompt."""
    temperature: float
    """Sampling temperature, by which logits are divided."""


def token_sequences(packed: PackedTrajectories) -> list[TokenSequence]:
    """View packed trajectories as token sequences, in order.

    Args:
        packed: packed trajectories, from `pack`.
    """
    columns = (split(packed, "prompt_ids"), split(packed, "response_ids"))
    parts = zip(*columns, packed["temperature"].tolist(), strict=True)
    return [TokenSequence(*part) for part in parts]


def concatenate(groups: Iterable[PackedTrajectories]) -> PackedTrajectories:
    """Join packed groups into one packed batch, in the order given.

    Args:
        groups: any number of packed groups, all alike with or without `reference_logprobs` and
            `teacher_logprobs`. Groups without trajectories are skipped.

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
        packed: packed trajectories, from `pack` or `concatenate`.

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
    """Summary of a group for the driver, without the tokens."""

    group_id: int
    prompt_index: int
    rewards: list[float]
    """[G] reward of each response; NaN for failed samples."""
    successes: list[bool]
    response_tokens: list[int]
    """[G] sampled tokens of each response."""
    response_lengths: list[int]
    """[G] all tokens of each response, with the environment's; the length limit counts these."""
    oldest_version: int
    """Oldest policy version of a sampled token; -1 if there is none, because all samples failed."""
    newest_version: int
    finish_reasons: list[str]
    errors: list[str]
    """Messages of the failed samples."""
    reward_terms: list[dict[str, float]]
    """[G] unweighted rewards of each response by name; those of a failed sample may be missing."""
    turns: list[int]
    """[G] turns of the policy in each response: its stretches between the environment's tokens."""
    reward_use: dict[str, float] = field(default_factory=dict)
    """What the rewards used for the group, such as a judge's tokens and cost; see `Score`."""


def summarize(group: PackedTrajectories) -> GroupSummary:
    """Reduce one group to the numbers that scheduling, advantages and metrics need.

    Args:
        group: packed trajectories of one prompt. At least one token was sampled, or all samples
            failed.
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
        reward_terms=list(group["reward_terms"]),
        turns=[_num_stretches(mask) for mask in masks],
    )


def _num_stretches(mask: NDArray[np.bool_]) -> int:
    """Return how many stretches of True values a mask has."""
    return int(np.count_nonzero(mask & ~np.concatenate([[False], mask[:-1]])))
