"""Collects the token logprobs of a step's first responses, for the rollout log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from grpo_components.exchange.weight_probe import PROBE_IDS
from grpo_components.models.logprobs import ResponseLogprobs, token_batch
from grpo_components.training.sample import TrainSample
from grpo_components.trajectory import TokenSequence, Trajectory

_DIGITS = 6
Logprobs = list[float | None]
"""[R] logprobs of one response, in nats; None where a token was not sampled or not measured."""


def keep_logprobs(members: Sequence[TrainSample], logprobs: Tensor) -> None:
    """Store the logprobs of logged responses in their samples."""
    if any(sample.logged for sample in members):
        parts = logprobs.detach().cpu().split([sample.num_tokens for sample in members])
        for sample, part in zip(members, parts, strict=True):
            sample.start_logprobs = part.numpy() if sample.logged else None


def gather_logprobs(samples: Sequence[TrainSample]) -> dict[int, list[dict[str, Logprobs | None]]]:
    """Gather the logprobs that all ranks kept for the log; collective."""
    logged = [sample for sample in samples if sample.logged]
    if not logged:
        return {}
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, [sample.start_logprobs for sample in logged])
    groups: dict[int, list[dict[str, Logprobs | None]]] = {}
    for sample, found in zip(logged, zip(*gathered, strict=True), strict=True):
        computed = next((values for values in found if values is not None), None)
        missing: Logprobs = [None] * len(sample.mask)
        trainer = missing if computed is None else _at(sample.mask, computed)
        rows = groups.setdefault(sample.trajectory.group_id, [])
        rows.append({**recorded_logprobs(sample.trajectory), "trainer_logprobs": trainer})
    return groups


def recorded_logprobs(trajectory: Trajectory) -> dict[str, Logprobs | None]:
    """Return the logprobs that a trajectory itself holds."""
    sampled, reference = trajectory.response_mask, trajectory.reference_logprobs
    recorded: dict[str, Logprobs | None] = {
        "generator_logprobs": _at(sampled, trajectory.generator_logprobs[sampled]),
        "trainer_logprobs": None,
        "reference_logprobs": None if reference is None else _at(sampled, reference[sampled]),
    }
    if trajectory.teacher_logprobs is not None:
        recorded["teacher_logprobs"] = _at(sampled, trajectory.teacher_logprobs[sampled])
    return recorded


@torch.no_grad()
def probe_logprobs(logprobs: ResponseLogprobs, device: torch.device) -> list[float]:
    """Compute the logprobs of the weight probe's tokens but the first; collective."""
    ids = np.array(PROBE_IDS)
    batch = token_batch([TokenSequence(ids[:1], ids[1:], 1.0)], device=device)
    return logprobs(batch)[0].tolist()


def _at(mask: NDArray[Any], values: NDArray[Any]) -> Logprobs:
    """Return [R] entries: the values in order where the mask is True, None elsewhere."""
    remaining = iter(values.tolist())
    return [round(next(remaining), _DIGITS) if here else None for here in mask.tolist()]
