"""Makes the micro-batch that takes the most memory among those that a config allows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from grpo_components.models.flops import ModelFlops
from grpo_components.models.logprobs import parts_of
from grpo_components.models.micro_batches import plan_micro_batches
from grpo_components.models.shared_prompts import arrange
from grpo_components.trajectory import TokenSequence

_META = torch.device("meta")  # masks of long sequences would take gigabytes
_MAX_RANKS, _MAX_ROUNDS = 4, 3
"""Ranks and micro-batches per rank that are planned: more would be more of the same size."""


@dataclass(frozen=True)
class BatchShape:
    """The batch of one optimizer update, and how it is split."""

    groups: int
    group_size: int
    prompt_tokens: int
    """Longest prompt."""
    response_tokens: int
    """Longest response."""
    num_data_ranks: int
    """Number of parts that the batch is split into."""
    tokens_per_micro_batch: int


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


def longest_micro_batches(shape: BatchShape, flops: ModelFlops, wide: float) -> list[MicroBatch]:
    """Return the micro-batches of which one takes the most memory: one or two.

    Tried are batches of responses that are all as long as allowed, of lengths spread evenly below
    that, and of short ones, whose prompts are copied most often as keys. The heaviest one that is
    alone in its update is kept, and the heaviest one that finds gradients of an earlier one.
    """
    longest, prompt = shape.response_tokens, shape.prompt_tokens
    spread = np.linspace(max(longest // 8, 1), longest, shape.group_size).astype(int)
    same = np.full(shape.group_size, 1)
    tried = [same * longest, spread]
    tried += [same * short for short in (prompt // 2, prompt // 4) if 0 < short < longest]
    kept: dict[bool, MicroBatch] = {}
    for lengths in tried:
        batch = _largest(shape, lengths.tolist(), flops)
        other = kept.get(batch.is_only)
        if other is None or _weight(batch.sequences, wide) > _weight(other.sequences, wide):
            kept[batch.is_only] = batch
    return list(kept.values())


def _largest(shape: BatchShape, lengths: Sequence[int], flops: ModelFlops) -> MicroBatch:
    """Plan groups of responses of the given lengths, and return the largest micro-batch."""
    tokens = shape.prompt_tokens + sum(lengths)
    rounds = shape.groups * tokens / shape.num_data_ranks / shape.tokens_per_micro_batch
    ranks = min(shape.num_data_ranks, _MAX_RANKS) if rounds < _MAX_ROUNDS else 1
    groups = shape.groups * ranks / shape.num_data_ranks * min(1.0, _MAX_ROUNDS / rounds)
    sequences = []
    for group in range(math.ceil(groups)):
        prompt = np.full(shape.prompt_tokens, group)
        sequences += [TokenSequence(prompt, np.zeros(n, np.int64), 1.0) for n in lengths]
    parts = parts_of(sequences)
    plan = plan_micro_batches(parts, flops.layers, ranks, shape.tokens_per_micro_batch)
    batches = [[sequences[i] for i in batch] for rank in plan for batch in rank if batch]
    largest = max(batches, key=lambda batch: _weight(batch, 1.0))
    return MicroBatch(largest, len(plan[0]) == 1)


def _weight(sequences: Sequence[TokenSequence], wide: float) -> float:
    """Return memory in units of one token's keys and values in one layer, masks left out."""
    column = arrange(parts_of(sequences), _META)
    keys = sum(block.keys.numel() for block in column.layout.padded.blocks)
    return wide * len(column.positions) + keys
