"""Computes logprobs of the reference and of probe tokens; gathers logprobs for the rollout log."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torchtune.modules.peft import disable_adapter

from grpo_components.exchange.weight_probe import PROBE_IDS
from grpo_components.models.logprobs import ResponseLogprobs, parts_of, token_batch
from grpo_components.models.shared_prompts import Part
from grpo_components.training.sample import TrainSample
from grpo_components.trajectory import TokenSequence, Trajectory

_DIGITS = 6
Logprobs = list[float | None]
"""[R] logprobs of one response, in nats; None where a token was not sampled or not measured."""


def keep_logprobs(members: Sequence[TrainSample], logprobs: Tensor) -> None:
    """Store the logprobs of logged responses in their samples, without waiting for the device."""
    if any(sample.logged for sample in members):
        parts = logprobs.detach().split([sample.num_tokens for sample in members])
        for sample, part in zip(members, parts, strict=True):
            sample.start_logprobs = part if sample.logged else None


def gather_logprobs(samples: Sequence[TrainSample]) -> dict[int, list[dict[str, Logprobs | None]]]:
    """Gather the logged responses' logprobs, by group id, from all ranks; collective."""
    logged = [sample for sample in samples if sample.logged]
    if not logged:
        return {}
    gathered: list[Any] = [None] * dist.get_world_size()
    kept = [sample.start_logprobs for sample in logged]
    own = [None if values is None else values.cpu().numpy() for values in kept]
    dist.all_gather_object(gathered, own)
    groups: dict[int, list[dict[str, Logprobs | None]]] = {}
    for sample, found in zip(logged, zip(*gathered, strict=True), strict=True):
        computed = next((values for values in found if values is not None), None)
        missing: Logprobs = [None] * len(sample.mask)
        trainer = missing if computed is None else _at(sample.mask, computed)
        rows = groups.setdefault(sample.trajectory.group_id, [])
        rows.append({**recorded_logprobs(sample.trajectory), "trainer_logprobs": trainer})
    return groups


def recorded_logprobs(trajectory: Trajectory) -> dict[str, Logprobs | None]:
    """Return a trajectory's logprobs by their names in the rollout log; the trainer's are None."""
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
    """Return logprobs of `PROBE_IDS` after the first id, to check engines' weights; collective."""
    ids = np.array(PROBE_IDS)
    batch = token_batch([TokenSequence(ids[:1], ids[1:], 1.0)], device=device)
    return logprobs(batch)[0].tolist()


@torch.no_grad()
def add_reference_logprobs(
    trajectories: Sequence[Trajectory],
    model: nn.Module,
    logprobs: ResponseLogprobs,
    plan: Callable[[list[Part]], list[list[int]]],
    device: torch.device,
) -> None:
    """Set `reference_logprobs` of a global batch; collective.

    The reference is the frozen base model, which is the adapted policy without its adapters.
    """
    lengths = [len(t.response_ids) for t in trajectories]
    flat = torch.zeros(sum(lengths), device=device)
    places = [place for place in flat.split(lengths) if len(place)]
    read = [trajectory for trajectory in trajectories if len(trajectory.response_ids)]
    with disable_adapter(model):
        for indices in plan(parts_of(read)):
            # A rank without a micro-batch of its own still has to join the others' collectives.
            members = [read[i] for i in indices] or read[:1]
            found = logprobs(token_batch(members, device=device))[0]
            parts = found.split([len(member.response_ids) for member in members])
            for index, part in zip(indices, parts, strict=bool(indices)):
                places[index].copy_(part)
    dist.all_reduce(flat)  # each rank has computed the logprobs of other responses
    for trajectory, part in zip(trajectories, flat.cpu().split(lengths), strict=True):
        trajectory.reference_logprobs = part.numpy()


def _at(mask: NDArray[Any], values: NDArray[Any]) -> Logprobs:
    """Return [R] entries: the values in order where the mask is True, None elsewhere."""
    remaining = iter(values.tolist())
    return [round(next(remaining), _DIGITS) if here else None for here in mask.tolist()]
