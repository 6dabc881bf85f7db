"""Advises how to split a number of GPUs between generators, trainers and references."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from grpo_components.errors import fail
from grpo_components.twin.setup import Setup
from grpo_components.twin.simulation import Prediction

Split = tuple[int, int, int]
"""Number of generators, trainers and references."""


def advise(
    setup: Setup, gpus: int, predict: Callable[[Setup], Prediction]
) -> dict[Split, Prediction]:
    """Search the split with the shortest step; each role has a GPU of its own.

    From an equal split, one GPU moves at a time from one kind of role to another, for as long as
    that shortens the step. Where it ends, no such move helps.
    """
    kinds = 3 if setup.num_references else 2
    if gpus < kinds:
        roles = "generators and trainers" if kinds == 2 else "generators, trainers and references"
        fail("--gpus", f"{gpus} given for {roles}", f"{kinds} or more")
    tried: dict[Split, Prediction] = {}

    def step_s(split: Split) -> float:
        if split not in tried:
            generators, trainers, references = split
            tried[split] = predict(
                replace(
                    setup,
                    num_generators=generators,
                    num_trainers=trainers,
                    num_references=references,
                    device="cuda",
                )
            )
        return tried[split].step_s

    start = [gpus // kinds] * kinds + [0] * (3 - kinds)
    start[0] += gpus - sum(start)
    best: Split = (start[0], start[1], start[2])
    stride = max(1, gpus // 8)
    while True:
        moves = [split for split in _moves(best, kinds, stride) if step_s(split) < step_s(best)]
        if moves:
            best = min(moves, key=step_s)
        elif stride > 1:
            stride //= 2
        else:
            step_s(best)
            return dict(sorted(tried.items(), key=lambda item: item[1].step_s))


def _moves(split: Split, kinds: int, stride: int) -> list[Split]:
    """Return the splits that differ by `stride` GPUs, moved from one kind of role to another."""
    found: list[Split] = []
    for source in range(kinds):
        for target in range(kinds):
            if source != target and split[source] > stride:
                moved = list(split)
                moved[source] -= stride
                moved[target] += stride
                found.append((moved[0], moved[1], moved[2]))
    return found
