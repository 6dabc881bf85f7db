"""Builds training samples (mask, loss weight, advantages) of batches and of supervised examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from grpo_components.errors import fail
from grpo_components.models.shared_prompts import to_device
from grpo_components.objective.contracts import checked_aggregation
from grpo_components.objective.token_advantages import TokenAdvantages
from grpo_components.trajectory import PackedTrajectories, Trajectory, response_numbers, unpack

_RECORDED = ("generator_logprobs", "token_versions", "reference_logprobs", "teacher_logprobs")


@dataclass
class TrainSample:
    """One trajectory of the batch, with what the training step computes for it."""

    trajectory: Trajectory
    mask: NDArray[np.bool_]
    """[R] True for tokens that are trained."""
    response: int = 0
    """Number of the response in the batch, from 0; trajectories of an agent session share it."""
    logged: bool = False
    """Whether the rollout log gets the logprobs of its tokens."""
    loss_weight: float = 0.0
    """Weight of each token's loss in the current update."""
    proximal_logprobs: Tensor | None = None
    """[N] float32, logprobs of the N trained tokens under the policy at the step's start."""
    start_logprobs: Tensor | None = None
    """[N] logprobs at the step's start, if the sample is `logged` and this rank computed them."""
    advantages: NDArray[np.float32] | None = None
    """[N] advantages of the N trained tokens."""
    updated: bool = False
    """Whether any optimizer update used the sample; the same on every rank."""
    weighted: Tensor | None = None
    """[N] bool, tokens with an off-policy weight above 0; set if this rank computed them."""

    @property
    def num_tokens(self) -> int:
        """Number of trained tokens N."""
        return int(self.mask.sum())


def make_samples(
    batch: PackedTrajectories,
    advantages: NDArray[Any],
    trained_tokens: Callable[[Trajectory], NDArray[np.bool_]],
    num_logged: int,
) -> list[TrainSample]:
    """Build a `TrainSample` for each trajectory of a batch; `advantages` has one per response."""
    responses = response_numbers(batch).tolist()
    num_responses = len(set(responses))
    if np.shape(advantages) != (num_responses,):
        problem = f"shape {np.shape(advantages)} given for {num_responses} responses"
        fail("advantages", problem, "one number per response")
    samples: list[TrainSample] = []
    for trajectory, response in zip(unpack(batch), responses, strict=True):
        trajectory.advantage = advantages[response].item()
        is_first = not samples or samples[-1].response != response
        logged = is_first and response < num_logged
        samples.append(TrainSample(trajectory, trained_tokens(trajectory), response, logged))
    return samples


def split_responses(samples: Sequence[TrainSample], num_parts: int) -> list[list[TrainSample]]:
    """Split a batch into parts of about equally many responses, one per update of an epoch."""
    chunks = np.array_split(range(samples[-1].response + 1 if samples else 0), num_parts)
    numbers = (set(chunk.tolist()) for chunk in chunks)
    return [[sample for sample in samples if sample.response in part] for part in numbers]


def set_loss_weights(part: Sequence[TrainSample], aggregation: Any) -> None:
    """Set each sample's loss weight by `aggregation`; an agent session counts as one response."""
    _, index = np.unique([sample.response for sample in part], return_inverse=True)
    counts = np.bincount(index, [sample.num_tokens for sample in part]).astype(np.int64)
    weights = checked_aggregation(aggregation, counts)
    for sample, weight in zip(part, weights[index].tolist(), strict=True):
        sample.loss_weight = weight


def spread_advantages(
    samples: Sequence[TrainSample], token_advantages: TokenAdvantages | None, step: int
) -> None:
    """Set each trained token's advantage: by `token_advantages`, or else that of the response."""
    if token_advantages is None:
        for sample in samples:
            sample.advantages = np.full(sample.num_tokens, sample.trajectory.advantage, np.float32)
        return
    trajectories = [sample.trajectory for sample in samples]
    parts = token_advantages(trajectories, [sample.mask for sample in samples], step)
    for sample, part in zip(samples, parts, strict=True):
        if part.shape != (sample.num_tokens,):
            problem = f"per_token returned shape {part.shape} for {sample.num_tokens} tokens"
            fail("advantages", problem, "one number per token")
        sample.advantages = part.astype(np.float32)


def token_columns(
    members: Sequence[TrainSample], version: int, device: torch.device
) -> dict[str, Tensor]:
    """Return the values of a micro-batch's N trained tokens on the device, as tensors [N] by name.

    `version` is the trainer's policy version. Logprobs of a model that the run does not have
    (reference, teacher) are left out.
    """
    columns: dict[str, NDArray[Any]] = {}
    for name in _RECORDED:
        if getattr(members[0].trajectory, name) is not None:
            values = [getattr(sample.trajectory, name)[sample.mask] for sample in members]
            columns[name] = np.concatenate(values)
    columns["advantages"] = np.concatenate([cast(Any, sample.advantages) for sample in members])
    counts = [sample.num_tokens for sample in members]
    columns["sequence_ids"] = np.repeat(np.arange(len(members)), counts)
    weights = np.array([sample.loss_weight for sample in members], np.float32)
    columns["weights"] = np.repeat(weights, counts)
    is_fresh = [sample.trajectory.oldest_version == version for sample in members]
    columns["is_fresh"] = np.repeat(is_fresh, counts)
    return dict(zip(columns, to_device([*columns.values()], device), strict=True))


class SupervisedExamples:
    """Prompts with desired responses; each optimizer update trains on a few of them.

    The choice depends only on the number of the update, so a resumed run continues the order.
    """

    def __init__(
        self,
        examples: Sequence[tuple[list[int], list[int]]],
        *,
        coeff: float,
        examples_per_update: int,
        seed: int,
    ) -> None:
        self.coeff, self._per_update, self._seed = coeff, examples_per_update, seed
        self._examples = examples

    def batch(self, update: int) -> list[TrainSample]:
        """Return the examples of one optimizer update."""
        first = update * self._per_update
        return [self._sample(place) for place in range(first, first + self._per_update)]

    def _sample(self, place: int) -> TrainSample:
        epoch, place = divmod(place, len(self._examples))
        order = np.random.default_rng([self._seed, epoch]).permutation(len(self._examples))
        prompt_ids, response_ids = self._examples[order[place]]
        size = len(response_ids)
        trajectory = Trajectory(
            prompt_ids=np.array(prompt_ids, np.int64),
            response_ids=np.array(response_ids, np.int64),
            response_mask=np.ones(size, np.bool_),
            generator_logprobs=np.zeros(size, np.float32),  # unused: not sampled
            token_versions=np.zeros(size, np.int32),
            prompt_index=int(order[place]),
            epoch=epoch,
            group_id=0,
            attempt=0,
            finish_reason="stop",
        )
        return TrainSample(trajectory, trajectory.response_mask)
