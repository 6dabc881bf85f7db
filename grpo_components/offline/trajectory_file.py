"""Writes trajectory files as a stand-in for a trainer; reads them as one for a generator."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby, islice
from os import SEEK_END
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grpo_components.exchange.weight_deltas import DeltaBucket, newest_manifests
from grpo_components.exchange.weight_probe import LoadedWeights
from grpo_components.exchange.weights import Manifest, snapshot_checksum
from grpo_components.training.step_result import StepResult
from grpo_components.training.token_logprobs import recorded_logprobs
from grpo_components.training.token_use import unanswered_tokens
from grpo_components.trajectory import (
    GroupSummary,
    PackedTrajectories,
    Trajectory,
    pack,
    summarize,
    unpack,
)

_ARRAYS = {
    "response_ids": np.int64,
    "response_mask": np.bool_,
    "generator_logprobs": np.float32,
    "token_versions": np.int32,
}
_PLAIN = ("finish_reason", "temperature", "reward_terms", "success", "error")


def group_line(group: Sequence[Trajectory]) -> str:
    """Format a group as one line of JSON: `prompt_index`, `prompt_ids` and a list `responses`.

    The line keeps everything that training needs, logprobs bit for bit. The reward of a failed
    sample is null.
    """
    responses = [
        {name: getattr(t, name).tolist() for name in _ARRAYS}
        | {name: getattr(t, name) for name in _PLAIN}
        | {"reward": None if math.isnan(t.reward) else t.reward}
        for t in group
    ]
    prompt = {"prompt_index": group[0].prompt_index, "prompt_ids": group[0].prompt_ids.tolist()}
    return json.dumps({**prompt, "responses": responses})


def read_groups(path: str | Path) -> Iterator[list[Trajectory]]:
    """Read the groups of a trajectory file, one from each line that `group_line` formatted."""
    with Path(path).open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
                group = [_trajectory(record, each) for each in record["responses"]]
                assert group, "responses: none"
            except (ValueError, KeyError, TypeError, AssertionError) as error:
                problem = f"not a group of responses, {type(error).__name__}: {error}"
                raise ValueError(f"{path}, line {number}: {problem}") from error
            yield group


def _trajectory(record: dict[str, Any], response: dict[str, Any]) -> Trajectory:
    reward = response["reward"]
    trajectory = Trajectory(
        prompt_ids=np.array(record["prompt_ids"], np.int64),
        prompt_index=record["prompt_index"],
        epoch=0,
        group_id=0,
        attempt=0,
        reward=math.nan if reward is None else reward,
        **{name: np.array(response[name], dtype) for name, dtype in _ARRAYS.items()},
        **{name: response[name] for name in _PLAIN},
    )
    trajectory.check()
    assert trajectory.failed == (reward is None), "reward: null only with finish_reason error"
    assert trajectory.failed or trajectory.response_mask.any(), "response_mask: must contain true"
    return trajectory


class TrajectoryWriter:
    """Stand-in for a trainer: writes each batch to a file, and leaves the policy at version 0."""

    def __init__(self, *, rank: int, path: str, logged_responses: int = 0) -> None:
        self._logged_responses = logged_responses
        self._path = Path(path) if rank == 0 else None
        self._wrote = False
        if self._path is not None:
            self._path.touch()

    def train_step(
        self, batch: PackedTrajectories, advantages: NDArray[np.float32], step: int
    ) -> StepResult:
        """Write a batch of whole groups, one line each; called in place of `Trainer.train_step`."""
        trajectories = unpack(batch)
        if self._path is not None:
            groups = [list(group) for _, group in groupby(trajectories, key=lambda t: t.group_id)]
            with self._path.open("rb+") as file:
                if not self._wrote:  # a process that was killed may have written this step before
                    file.truncate(sum(map(len, islice(file, step * len(groups)))))
                file.seek(0, SEEK_END)
                file.writelines(f"{group_line(group)}\n".encode() for group in groups)
            self._wrote = True
        logprobs: dict[int, list[Any]] = {}
        for trajectory in trajectories[: self._logged_responses]:
            logprobs.setdefault(trajectory.group_id, []).append(recorded_logprobs(trajectory))
        versions = np.concatenate([t.token_versions[t.response_mask] for t in trajectories])
        return StepResult(
            policy_version=0,
            token_versions=dict(Counter(versions.tolist())),
            token_logprobs=logprobs,
            trained_tokens=0,
            skipped_because="",
            metrics={"policy_version": 0, "off_policy/correction_mass": math.nan},
            group_tokens=_written(trajectories),
        )


def _written(trajectories: Iterable[Trajectory]) -> dict[int, dict[str, int]]:
    """Count tokens by group id: `written`, or sampled for an agent but unwritten (`unanswered`)."""
    groups: dict[int, dict[str, int]] = {}
    for each in trajectories:
        counts = groups.setdefault(each.group_id, {"written": 0, "unanswered": 0})
        counts["written"] += int(each.response_mask.sum())
        counts["unanswered"] += unanswered_tokens(each)
    return groups


class RecordedGroups:
    """Stand-in for a generator: hands out the groups of a trajectory file."""

    def __init__(self, *, number: int, path: str) -> None:
        self._groups = list(read_groups(path))

    def reserve(self, patience_s: float) -> int:
        """Return 1 at once, in place of `Generator.reserve`: a recorded group needs no capacity."""
        return 1

    def generate_group(
        self, prompt: dict[str, Any], epoch: int, group_id: int, attempt: int, temperature: float
    ) -> tuple[PackedTrajectories, GroupSummary, None]:
        """Return the recorded group of a prompt; called in place of `Generator.generate_group`."""
        row = prompt["prompt_index"]
        identity = {"prompt_index": row, "epoch": epoch, "group_id": group_id, "attempt": attempt}
        group = pack([replace(trajectory, **identity) for trajectory in self._groups[row]])
        return group, summarize(group), None

    def load_weights(
        self, version: int, *buckets: tuple[Manifest, NDArray[np.uint8]] | DeltaBucket
    ) -> LoadedWeights:
        """Acknowledge new weights without loading them: return their version and checksum."""
        return version, snapshot_checksum(newest_manifests(buckets)), None

    def begin_attempt(self) -> None:
        """Do nothing when the run restarts or resumes: the recorded groups stay the same."""
