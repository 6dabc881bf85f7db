"""Trajectories in a file: who writes them instead of training, and who hands them out again."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grpo_components.exchange.weights import Manifest, snapshot_checksum
from grpo_components.training.token_logprobs import recorded_logprobs
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
    """One JSON object of a group: `prompt_index`, `prompt_ids`, and a list `responses`.

    Args:
        group: the trajectories of one prompt. All that training needs is kept, logprobs bit for
            bit; a reward that failed is null.
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
    """The groups of a file that has a `group_line` each.

    Args:
        path: of the file.

    Raises:
        ValueError: naming the line (from 1) that is no such group.
    """
    with Path(path).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
                group = [_trajectory(record, each) for each in record["responses"]]
                for trajectory in group:
                    trajectory.check()
                assert group, "it has no responses"
            except (ValueError, TypeError, KeyError, AssertionError) as error:
                what = f"{type(error).__name__}: {error}"
                raise ValueError(f"{path}, line {number}: no group of responses, {what}") from error
            yield group


def _trajectory(record: dict[str, Any], response: dict[str, Any]) -> Trajectory:
    arrays: dict[str, Any] = {
        name: np.array(response[name], dtype=dtype) for name, dtype in _ARRAYS.items()
    }
    return Trajectory(
        prompt_ids=np.array(record["prompt_ids"], dtype=np.int64),
        prompt_index=int(record["prompt_index"]),
        epoch=0,
        group_id=0,
        attempt=0,
        reward=math.nan if response["reward"] is None else float(response["reward"]),
        **arrays,
        **{name: response[name] for name in _PLAIN},
    )


class TrajectoryWriter:
    """Stands where a trainer does, and writes each batch down: the policy stays version 0.

    Args:
        rank: only the first one writes.
        path: of the file, which begins anew with this object.
        logged_responses: so many of each batch's first return the logprobs of their tokens.
    """

    def __init__(self, *, rank: int, path: str, logged_responses: int = 0) -> None:
        self._logged_responses = logged_responses
        self._path = Path(path) if rank == 0 else None
        if self._path is not None:
            self._path.write_text("")

    def train_step(
        self, batch: PackedTrajectories, advantages: NDArray[np.float32], step: int
    ) -> dict[str, Any]:
        """Write a batch, one line a group, in the place of `Trainer.train_step`.

        Args:
            batch: whole groups.
            advantages: [S] one per trajectory; they are not kept.
            step: steps done before this one.

        Returns:
            The metrics that the training loop counts with.
        """
        trajectories = unpack(batch)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                for _, group in groupby(trajectories, key=lambda t: t.group_id):
                    file.write(group_line(list(group)) + "\n")
        logprobs: dict[int, list[Any]] = {}
        for trajectory in trajectories[: self._logged_responses]:
            logprobs.setdefault(trajectory.group_id, []).append(recorded_logprobs(trajectory))
        versions = np.concatenate([t.token_versions[t.response_mask] for t in trajectories])
        return {
            "policy_version": 0,
            "token_versions": dict(Counter(versions.tolist())),
            "token_logprobs": logprobs,
            "trained_tokens": 0.0,
            "off_policy/correction_mass": math.nan,
        }


class RecordedGroups:
    """Stands where a generator does, and hands out the groups of a file.

    Args:
        number: which of the generators.
        path: of the file.
    """

    def __init__(self, *, number: int, path: str) -> None:
        self._groups = list(read_groups(path))

    def generate_group(
        self, prompt: dict[str, Any], epoch: int, group_id: int, attempt: int, temperature: float
    ) -> tuple[PackedTrajectories, GroupSummary, None]:
        """The recorded group of a prompt, in the place of `Generator.generate_group`.

        Args:
            prompt: a row of the recorded prompts; its `prompt_index` is the group's line, from 0.
            epoch: pass over the file.
            group_id: of the new run.
            attempt: life of the new run.
            temperature: not used: the responses have that which they were sampled at.

        Returns:
            The packed group and its summary; there is no text to show.
        """
        row = prompt["prompt_index"]
        identity = {"prompt_index": row, "epoch": epoch, "group_id": group_id, "attempt": attempt}
        group = [replace(trajectory, **identity) for trajectory in self._groups[row]]
        return pack(group), summarize(group), None

    def load_weights(
        self, version: int, *buckets: tuple[Manifest, NDArray[np.uint8]]
    ) -> tuple[int, str]:
        """Acknowledge new weights, which nothing here is sampled with."""
        return version, snapshot_checksum(manifest for manifest, _ in buckets)

    def begin_attempt(self) -> None:
        """Nothing changes here when the run goes back to a checkpoint."""
