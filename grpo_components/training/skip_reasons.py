"""Explains why an update was skipped: names the first token or gradient that is not finite."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from grpo_components.errors import fail
from grpo_components.objective.losses import LossInputs
from grpo_components.training.sample import TrainSample

_INPUTS = {
    "advantage": "advantages",
    "trainer logprob": "trainer_logprobs",
    "generator logprob": "generator_logprobs",
    "reference logprob": "reference_logprobs",
    "teacher logprob": "teacher_logprobs",
}
_Found = tuple[tuple[int, ...], str]
"""A sortable place, and the description of what is wrong there."""
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module.")


class UpdateWatch:
    """Keeps the inputs of one optimizer update on one rank, to explain why it was skipped.

    Reading the numbers waits for the device, so they are read only after an update was skipped.
    """

    def __init__(self) -> None:
        self._seen: list[tuple[list[TrainSample], LossInputs, Tensor | None, Tensor]] = []

    def record(
        self, members: list[TrainSample], inputs: LossInputs, weights: Tensor | None, losses: Tensor
    ) -> None:
        """Keep one micro-batch, without its autograd graph.

        Args:
            members: responses of the micro-batch.
            inputs: inputs of the loss for the N trained tokens.
            weights: [N] weights of the off-policy correction; None without a correction.
            losses: [N] losses after the correction.
        """
        inputs = replace(inputs, trainer_logprobs=inputs.trainer_logprobs.detach(), entropy=None)
        self._seen.append((members, inputs, weights, losses.detach()))

    def reason(self, model: nn.Module, metrics: Mapping[str, float], first_of: str = "") -> str:
        """Return what was not finite in a skipped update; collective."""
        if first_of:
            self._check_first(first_of)
        if token := _first(self._first_bad_token()):
            return token
        total = metrics.get("loss/total", math.nan)
        if not math.isfinite(total):
            ptx = metrics.get("loss/ptx", 0.0)
            if not math.isfinite(ptx):
                return f"the supervised loss (ptx) is {ptx}"
            return f"the sum of the losses is {total}, although each of them is finite"
        if parameter := _first(_first_bad_gradient(model)):
            return f"the loss is finite, but {parameter}"
        return "the norm of the gradient overflows, although each of its numbers is finite"

    def _check_first(self, name: str) -> None:
        """Raise a ConfigError if no token with finite inputs has a finite loss; collective."""
        given = good = 0
        for _, inputs, weights, losses in self._seen:
            fields = [getattr(inputs, field) for field in _INPUTS.values()]
            known = [values for values in (*fields, weights) if values is not None]
            usable = torch.stack([values.isfinite() for values in known]).all(0)
            given, good = given + int(usable.sum()), good + int((losses.isfinite() & usable).sum())
        gathered: list[tuple[int, int]] = [(0, 0)] * dist.get_world_size()
        dist.all_gather_object(gathered, (given, good))
        given, good = (sum(counts) for counts in zip(*gathered, strict=True))
        if given and not good:
            problem = f"no finite number for any of the {given} tokens of its first batch"
            fail("loss", f"{name} returned {problem}", "finite losses")

    def _first_bad_token(self) -> _Found | None:
        found: list[tuple[tuple[int, int, int], int, int]] = []
        for number, (members, _, _, losses) in enumerate(self._seen):
            ends = np.cumsum([sample.num_tokens for sample in members])
            for token in (~losses.isfinite()).nonzero().flatten().tolist():
                index = int(np.searchsorted(ends, token, side="right"))
                sample, from_end = members[index], token - int(ends[index])
                position = int(np.flatnonzero(sample.mask)[from_end])
                place = (sample.trajectory.group_id, sample.number, position)
                found.append((place, number, token))
        if not found:
            return None
        place, number, token = min(found)
        return place, _describe(place, token, *self._seen[number][1:])


def _describe(
    place: tuple[int, int, int],
    token: int,
    inputs: LossInputs,
    weights: Tensor | None,
    losses: Tensor,
) -> str:
    values = {name: getattr(inputs, field) for name, field in _INPUTS.items()}
    values["off-policy weight"] = weights
    known = {name: value[token].item() for name, value in values.items() if value is not None}
    # The first value that is not finite is the cause; if all are finite, the loss is at fault.
    causes = [f"{name} {value}" for name, value in known.items() if not math.isfinite(value)]
    shown = causes[:1] or [f"{name} {value:.4g}" for name, value in known.items()]
    group, response, position = place
    return (
        f"the loss is {losses[token].item()} at group {group}, response {response}, token "
        f"{position} ({', '.join(shown)})"
    )


def _first_bad_gradient(model: nn.Module) -> _Found | None:
    for number, (name, parameter) in enumerate(model.named_parameters()):
        gradient = parameter.grad
        if gradient is None:
            continue
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        bad = local[~local.isfinite()]
        if len(bad):
            for wrapper in _WRAPPERS:
                name = name.replace(wrapper, "")
            return (number,), f"the gradient of {name} has {bad[0].item()}"
    return None


def _first(found: _Found | None) -> str:
    """Return the description of the first place over all ranks, or an empty string; collective."""
    gathered: list[_Found | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, found)
    return min((each for each in gathered if each is not None), default=((), ""))[1]


def nothing_to_train(samples: Sequence[TrainSample]) -> str:
    """Return the reason why no token of a batch is trained."""
    trajectories = [sample.trajectory for sample in samples]
    failed = sum(trajectory.failed for trajectory in trajectories)
    cut_off = sum(trajectory.finish_reason == "length" for trajectory in trajectories)
    return (
        f"no token of its {len(trajectories)} responses can be trained: {failed} failed, "
        f"{cut_off} were cut off, the others have no tokens or only stale ones"
    )
