"""Defines the trajectory, a record of one response to one prompt, and its packed form."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

FinishReason = Literal["stop", "length", "abort", "error"]

Prompt = dict[str, Any]
"""One row of a prompt data set: prompt_index, prompt_ids [P], prompt_text, answer, and the further
columns of the data set. The generator adds `seed`, for anything random in the environment."""
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
SESSION_COUNTS = ("calls", "trajectories", "prompt_tokens", "cached_tokens")
"""Names of the counts in the record of an agent's session; docs/agents.md explains them."""
_OBJECTS = ("finish_reason", "reward_terms", "error", "session")


@dataclass
class Trajectory:
    """An unpadded response to a prompt; or part of it, if an agent's calls form several dialogues.

    Later stages of a run fill in later fields, and never overwrite earlier ones. A *group* is the
    list of the trajectories of the `group_size` responses that answer one prompt. P is the number
    of tokens of the prompt, R that of the response.
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
    """Number of the group, from 0, in the order in which the driver first started the groups."""
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
    session: dict[str, Any] | None = None
    """Agent session that made the trajectory; None without an agent. `sample` is the number of the
    response in its group; a session's first trajectory has more keys (docs/agents.md)."""

    def check(self) -> None:
        """Assert the record's invariants: equal lengths, finite logprobs, known versions."""
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
    """Pack records: [P] and [R] fields as `(flat, lengths)`, scalars as arrays, the rest as lists.

    Either all records have `reference_logprobs` or none has; likewise `teacher_logprobs`.
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
    """Cut one [P] or [R] field into one array per trajectory, each a view of the flat array."""
    flat, lengths = packed[name]
    sizes = lengths.tolist()
    ends = itertools.accumulate(sizes)
    return [flat[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def unpack(packed: PackedTrajectories) -> list[Trajectory]:
    """Turn packed trajectories back into records with views of the flat arrays."""
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


def concatenate(groups: Iterable[PackedTrajectories]) -> PackedTrajectories:
    """Join packed groups in new arrays: the same as `pack` of all their trajectories."""
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


def response_numbers(packed: PackedTrajectories) -> NDArray[np.int64]:
    """Number the responses in a batch from 0; return [S] the number of each trajectory's response.

    Trajectories of one agent session follow each other and share a number; any other trajectory is
    a response of its own.
    """
    sessions, groups = packed["session"], packed["group_id"].tolist()
    numbers: list[int] = []
    last: tuple[int, int] | None = None
    for group, session in zip(groups, sessions, strict=True):
        this = None if session is None else (group, session["sample"])
        same = this is not None and this == last
        numbers.append(numbers[-1] + (not same) if numbers else 0)
        last = this
    return np.array(numbers, dtype=np.int64)


def _all_missing(values: Sequence[Any], name: str) -> bool:
    missing = [value is None for value in values]
    assert all(missing) or not any(missing), f"{name}: set on some trajectories only"
    return any(missing)


def batch_hash(packed: PackedTrajectories) -> str:
    """Return a fingerprint of a batch: xxh3 of 128 bits, over trajectories and their order.

    It leaves out `attempt`, which a resume increments, and `error`, whose text may name a process;
    of `session`, it includes only the number of the response.
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

    for name in sorted(packed.keys() - {"attempt", "error", "session"}):
        digest.update(name.encode())
        update(packed[name])
    if any(packed["session"]):
        update(response_numbers(packed))
    return digest.hexdigest()


@dataclass(frozen=True)
class GroupSummary:
    """Summary of a group for the driver (the recipe's process), without the tokens."""

    group_id: int
    prompt_index: int
    rewards: list[float]
    """[G] reward of each response; NaN for failed samples."""
    successes: list[bool]
    response_tokens: list[int]
    """[G] sampled tokens of each response, including a session's tokens that no trajectory has."""
    response_lengths: list[int]
    """[G] all tokens of each response, including the environment's; the length limit counts these.
    For an agent session: those of the trajectory that has the longest response."""
    oldest_version: int
    """Oldest policy version of a sampled token; -1 if there is none, because all samples failed."""
    newest_version: int
    finish_reasons: list[str]
    errors: list[str]
    """Messages of the failed samples."""
    reward_terms: list[dict[str, float]]
    """[G] unweighted rewards of each response by name; those of a failed sample may be missing."""
    turns: list[int]
    """[G] number of the policy's turns in each response: unbroken runs of sampled tokens."""
    sessions: dict[str, int] = field(default_factory=dict)
    """`count` of agent sessions, and sums of `SESSION_COUNTS` over them; empty without agents."""
    reward_use: dict[str, float] = field(default_factory=dict)
    """Resources that the rewards used, such as a judge's tokens and cost; see `Score`."""
    seeds: list[int] = field(default_factory=list)
    """[G] sampling seed of each response; empty unless a generator has made this summary."""

    @property
    def scored_successes(self) -> list[bool]:
        """Whether each response succeeded; failed samples (reward NaN) are left out."""
        pairs = zip(self.successes, self.rewards, strict=True)
        return [success for success, reward in pairs if not math.isnan(reward)]


def summarize(group: PackedTrajectories) -> GroupSummary:
    """Reduce one group to the numbers that scheduling, advantages and metrics need."""
    trajectories = unpack(group)
    versions = group["token_versions"][0][group["response_mask"][0]]
    if not len(versions):
        failed = all(t.failed for t in trajectories)
        assert failed, f"group {trajectories[0].group_id}: no sampled token"
        versions = np.array([-1])
    numbered = zip(response_numbers(group).tolist(), trajectories, strict=True)
    by_number = itertools.groupby(numbered, key=lambda pair: pair[0])
    responses = [[t for _, t in pairs] for _, pairs in by_number]
    first = [parts[0] for parts in responses]
    return GroupSummary(
        group_id=first[0].group_id,
        prompt_index=first[0].prompt_index,
        rewards=[t.reward for t in first],
        successes=[t.success for t in first],
        response_tokens=[
            (parts[0].session or {}).get(
                "sampled_tokens", sum(int(t.response_mask.sum()) for t in parts)
            )
            for parts in responses
        ],
        response_lengths=[max(len(t.response_mask) for t in parts) for parts in responses],
        oldest_version=int(versions.min()),
        newest_version=int(versions.max()),
        finish_reasons=[
            "length" if any(t.finish_reason == "length" for t in parts) else parts[0].finish_reason
            for parts in responses
        ],
        errors=[t.error for t in trajectories if t.error is not None],
        reward_terms=[t.reward_terms for t in first],
        turns=[sum(_num_stretches(t.response_mask) for t in parts) for parts in responses],
        sessions=_session_counts([t.session for t in first if t.session]),
    )


def _session_counts(sessions: Sequence[dict[str, Any]]) -> dict[str, int]:
    if not sessions:
        return {}
    counts = {name: sum(session[name] for session in sessions) for name in SESSION_COUNTS}
    return {"count": len(sessions), **counts}


def _num_stretches(mask: NDArray[np.bool_]) -> int:
    return int(np.count_nonzero(mask & ~np.concatenate([[False], mask[:-1]])))
