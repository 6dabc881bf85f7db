"""Makes the micro-batch that takes the most memory among those that a config allows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from grpo_components.models.flops import ModelFlops
from grpo_components.models.logprobs import parts_of
from grpo_components.models.micro_batches import plan_micro_batches
from grpo_components.models.shared_prompts import arrange
from grpo_components.settings import Settings
from grpo_components.trajectory import TokenSequence

_META = torch.device("meta")  # masks of long sequences would take gigabytes
_MAX_RANKS, _MAX_ROUNDS = 4, 3
"""Ranks and micro-batches per rank that are planned: more would be more of the same size."""


@dataclass(frozen=True)
class MicroBatch:
    """The sequences of one forward pass."""

    sequences: list[TokenSequence]
    is_only: bool
    """Whether no rank has another micro-batch in the same update."""

    @property
    def tokens(self) -> int:
        """Tokens of the forward pass, each prompt counted once."""
        return len(arrange(parts_of(self.sequences), _META).positions)


def longest_micro_batches(
    cfg: Settings, prompt: int, groups: int, ranks: int, flops: ModelFlops, wide: float
) -> list[MicroBatch]:
    """Return the micro-batches of which one takes the most memory: one or two.

    Tried are batches of responses that are all as long as allowed, of lengths spread evenly below
    that, and of short ones, whose prompts are copied most often as keys. The heaviest one that is
    alone in its update is kept, and the heaviest one that finds gradients of an earlier one.
    """
    longest, same = cfg.generator.max_response_tokens, np.full(cfg.group_size, 1)
    spread = np.linspace(max(longest // 8, 1), longest, cfg.group_size).astype(int)
    tried = [same * longest, spread]
    tried += [same * short for short in (prompt // 2, prompt // 4) if 0 < short < longest]
    kept: dict[bool, MicroBatch] = {}
    for lengths in tried:
        batch = _largest(cfg.tokens_per_micro_batch, prompt, lengths, groups, ranks, flops)
        other = kept.get(batch.is_only)
        if other is None or _weight(batch.sequences, wide) > _weight(other.sequences, wide):
            kept[batch.is_only] = batch
    return list(kept.values())


def _largest(
    budget: int, prompt: int, lengths: NDArray[np.int64], groups: int, ranks: int, flops: ModelFlops
) -> MicroBatch:
    """Plan groups of responses of the given lengths, and return the largest micro-batch."""
    rounds = groups * (prompt + int(lengths.sum())) / ranks / budget
    planned = min(ranks, _MAX_RANKS) if rounds < _MAX_ROUNDS else 1
    sequences = []
    for group in range(math.ceil(groups * planned / ranks * min(1.0, _MAX_ROUNDS / rounds))):
        ids = np.full(prompt, group)
        sequences += [TokenSequence(ids, np.zeros(n, np.int64), 1.0) for n in lengths]
    plan = plan_micro_batches(parts_of(sequences), flops.layers, planned, budget)
    batches = [[sequences[i] for i in batch] for rank in plan for batch in rank if batch]
    largest = max(batches, key=lambda batch: _weight(batch, 1.0))
    return MicroBatch(largest, len(plan[0]) == 1)


def _weight(sequences: Sequence[TokenSequence], wide: float) -> float:
    """Return memory in units of one token's keys and values in one layer, masks left out."""
    column = arrange(parts_of(sequences), _META)
    keys = sum(block.keys.numel() for block in column.layout.padded.blocks)
    return wide * len(column.positions) + keys
