"""Writes and reads trajectory files; stand-ins for trainer and generator do so in partial runs."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from grpo_components.exchange.weights import Manifest, snapshot_checksum
from grpo_components.training.step_result import StepResult
from grpo_components.training.token_logprobs import recorded_logprobs
from grpo_components.trajectory import (
    FinishReason,
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
_ROUNDING = 1e-3
"""How far rounding may lift a logprob above 0, in nats."""
_PLAIN = ("finish_reason", "temperature", "reward_terms", "success", "error")


def group_line(group: Sequence[Trajectory]) -> str:
    """Format a group as one line of JSON: `prompt_index`, `prompt_ids` and a list `responses`.

    The line keeps everything that training needs, logprobs bit for bit. The reward of a failed
    sample is null.

    Args:
        group: the trajectories of one prompt.
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
    """Read the groups of a trajectory file, one from each line that `group_line` formatted.

    Args:
        path: path of the trajectory file.

    Raises:
        ValueError: a line is not a valid group; names the line, from 1, and the reason.
    """
    with Path(path).open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line.decode("utf-8"))
                group = [_trajectory(record, each) for each in record["responses"]]
                _require(len(group) > 0, "responses: empty")
            # Large numbers raise OverflowError, deeply nested brackets RecursionError.
            except (ValueError, TypeError, KeyError, ArithmeticError, RecursionError) as error:
                kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
                problem = f"not a group of responses: {kind}{error}"
                raise ValueError(f"{path}, line {number}: {problem}") from error
            yield group


def _trajectory(record: Mapping[str, Any], response: Mapping[str, Any]) -> Trajectory:
    trajectory = Trajectory(
        prompt_ids=_array(record, "prompt_ids", np.int64),
        prompt_index=int(record["prompt_index"]),
        epoch=0,
        group_id=0,
        attempt=0,
        reward=math.nan if response["reward"] is None else float(response["reward"]),
        **{name: _array(response, name, dtype) for name, dtype in _ARRAYS.items()},
        **{name: response[name] for name in _PLAIN},
    )
    try:
        trajectory.check()
    except AssertionError as error:  # here the file is wrong, not our code
        raise ValueError(str(error)) from None
    for name in ("prompt_ids", "response_ids"):
        _require((getattr(trajectory, name) >= 0).all(), f"{name}: below 0")
    reasons = get_args(FinishReason)
    _require(trajectory.finish_reason in reasons, f"finish_reason: allowed: {', '.join(reasons)}")
    scored = math.isfinite(trajectory.reward) and trajectory.error is None
    failed = response["reward"] is None and isinstance(trajectory.error, str)
    right = failed if trajectory.failed else scored
    _require(right, "reward: allowed: a number, or null with finish_reason error and an error text")
    _require(
        trajectory.failed or trajectory.response_mask.any(), "response_mask: must contain true"
    )
    logprobs = trajectory.generator_logprobs[trajectory.response_mask]
    _require((logprobs <= _ROUNDING).all(), "generator_logprobs: above 0")
    temperature = trajectory.temperature
    positive = type(temperature) in (int, float) and 0 < temperature < math.inf
    _require(positive, "temperature: must be a number above 0")
    _require(type(trajectory.success) is bool, "success: must be true or false")
    terms = trajectory.reward_terms
    numeric = isinstance(terms, dict) and all(type(v) in (int, float) for v in terms.values())
    _require(numeric, "reward_terms: must be numbers by name")
    return trajectory


def _array(values: Mapping[str, Any], name: str, dtype: type[np.generic]) -> NDArray[Any]:
    """Convert a JSON list to an array, after a type check: NumPy would turn text into numbers."""
    array = np.array(values[name])
    kinds = {np.bool_: "b", np.float32: "fiu"}.get(dtype, "iu")
    fits = array.ndim == 1 and (array.dtype.kind in kinds or not array.size)
    what = {"b": "true and false", "fiu": "numbers"}.get(kinds, "whole numbers")
    _require(fits, f"{name}: must be a list of {what}")
    return np.array(values[name], dtype)


def _require(condition: Any, problem: str) -> None:
    if not condition:
        raise ValueError(problem)


class TrajectoryWriter:
    """Stand-in for a trainer that writes each batch to a file; the policy stays at version 0.

    Args:
        rank: rank of this process; only rank 0 writes.
        path: path of the trajectory file; an existing file is emptied.
        logged_responses: number of responses, the first of each batch, to return logprobs of.
    """

    def __init__(self, *, rank: int, path: str, logged_responses: int = 0) -> None:
        self._logged_responses = logged_responses
        self._path = Path(path) if rank == 0 else None
        if self._path is not None:
            self._path.write_text("")

    def train_step(
        self, batch: PackedTrajectories, advantages: NDArray[np.float32], step: int
    ) -> StepResult:
        """Write a batch, one line per group; called in place of `Trainer.train_step`.

        Args:
            batch: whole groups, packed.
            advantages: [S] float32, one per trajectory; not written.
            step: training steps done before this one.

        Returns:
            The outcome of a step that trained nothing.
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
        return StepResult(
            policy_version=0,
            token_versions=dict(Counter(versions.tolist())),
            token_logprobs=logprobs,
            trained_tokens=0,
            skipped_because="",
            metrics={"policy_version": 0, "off_policy/correction_mass": math.nan},
        )


class RecordedGroups:
    """Stand-in for a generator that hands out the groups of a file.

    Args:
        number: number of this generator, from 0.
        path: path of the trajectory file.
    """

    def __init__(self, *, number: int, path: str) -> None:
        self._groups = list(read_groups(path))

    def generate_group(
        self, prompt: dict[str, Any], epoch: int, group_id: int, attempt: int, temperature: float
    ) -> tuple[PackedTrajectories, GroupSummary, None]:
        """Return the recorded group of a prompt; called in place of `Generator.generate_group`.

        Args:
            prompt: a row of `RecordedPrompts`; its `prompt_index` is the group's line, from 0.
            epoch: pass over the file, from 0.
            group_id: id of the group in the new run.
            attempt: number of the new run's attempt, from 0.
            temperature: not used; the responses keep the temperature they were sampled with.

        Returns:
            The packed group, its summary, and None: there is no text for the rollout log.
        """
        row = prompt["prompt_index"]
        identity = {"prompt_index": row, "epoch": epoch, "group_id": group_id, "attempt": attempt}
        group = pack([replace(trajectory, **identity) for trajectory in self._groups[row]])
        return group, summarize(group), None

    def load_weights(
        self, version: int, *buckets: tuple[Manifest, NDArray[np.uint8]]
    ) -> tuple[int, str]:
        """Return version and checksum of new weights, without loading them."""
        return version, snapshot_checksum(manifest for manifest, _ in buckets)

    def begin_attempt(self) -> None:
        """Do nothing: the groups do not depend on the attempt."""
