"""Decides which tokens of a step are trained, and counts the others by cause."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from grpo_components.training.sample import TrainSample
from grpo_components.trajectory import Trajectory


class TokenUse:
    """Counts each group's sampled tokens in a step by cause: trained, or the reason why not.

    The causes: `failed` (in a failed sample), `overlong` (in a response that a length limit ended),
    `stale` (sampled by a policy version that is too old), `unanswered` (sampled for an agent, but
    in none of its trajectories), `skipped` (no update with the token had a finite loss and
    gradient), `off_policy` (every update gave the token weight 0), and `trained`. Each token counts
    once, for the first of these causes that applies, whatever the number of epochs. No cause is
    computed as the total minus the others, so that their sum can be checked.
    """

    def __init__(self, oldest: int, mask_overlong: bool, corrects: bool) -> None:
        self._oldest, self._mask_overlong, self._corrects = oldest, mask_overlong, corrects

    def trained_tokens(self, trajectory: Trajectory) -> NDArray[np.bool_]:
        """Return [R] bool, tokens to train: sampled, not too old, not failed, not masked."""
        cut_off = self._mask_overlong and trajectory.finish_reason == "length"
        fresh = trajectory.token_versions >= self._oldest
        return trajectory.response_mask & fresh & (not (trajectory.failed or cut_off))

    def count(
        self, samples: Sequence[TrainSample], device: torch.device, num_copies: int
    ) -> dict[int, dict[str, int]]:
        """Return group id -> cause -> token count; collective if off-policy weights are used."""
        weighted = _over_ranks(samples, device, num_copies) if self._corrects else None
        groups: dict[int, Counter[str]] = {}
        for number, sample in enumerate(samples):
            counts = groups.setdefault(sample.trajectory.group_id, Counter())
            counts.update(self._not_trained(sample.trajectory))
            if not sample.updated:
                counts["skipped"] += sample.num_tokens
            elif weighted is None:
                counts["trained"] += sample.num_tokens
            else:
                counts["trained"] += int(weighted[0, number])
                counts["off_policy"] += int(weighted[1, number])
        return {group: dict(+counts) for group, counts in groups.items()}

    def _not_trained(self, trajectory: Trajectory) -> Mapping[str, int]:
        sampled, unanswered = trajectory.response_mask, unanswered_tokens(trajectory)
        if trajectory.failed:  # of a failed session, no trajectory has the tokens
            session = trajectory.session or {}
            return {"failed": session.get("sampled_tokens", int(sampled.sum()))}
        if self._mask_overlong and trajectory.finish_reason == "length":
            return {"overlong": int(sampled.sum()), "unanswered": unanswered}
        old = trajectory.token_versions < self._oldest
        return {"stale": int((sampled & old).sum()), "unanswered": unanswered}


def unanswered_tokens(trajectory: Trajectory) -> int:
    """Return how many tokens were sampled in an agent session but are in no trajectory of it."""
    return (trajectory.session or {}).get("unanswered_tokens", 0)


def keep_weighted(members: Sequence[TrainSample], weights: Tensor | None) -> None:
    """Mark tokens with an off-policy weight above 0, for `TokenUse.count`; needs no device sync."""
    if weights is None:
        return
    parts = (weights.detach() != 0).split([sample.num_tokens for sample in members])
    for sample, part in zip(members, parts, strict=True):
        sample.weighted = part if sample.weighted is None else sample.weighted | part


def _over_ranks(
    samples: Sequence[TrainSample], device: torch.device, num_copies: int
) -> NDArray[np.int64]:
    """Count each sample's tokens with off-policy weight above 0, and with 0: [2, S]; collective."""
    numbers = partial(torch.zeros, dtype=torch.int64, device=device)
    none = numbers(2)
    rows: list[Any] = [
        none if marks is None else torch.stack([marks.sum(), (~marks).sum()])
        for marks in (sample.weighted for sample in samples)
    ]
    counts = torch.stack(rows, dim=1) if rows else numbers(2, 0)
    dist.all_reduce(counts)
    return (counts // num_copies).cpu().numpy()
