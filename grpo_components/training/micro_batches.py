"""Which trajectories share a forward pass: whole batches split by rank, length and token budget."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

Plan = list[list[list[int]]]
"""plan[rank][i]: indices of the trajectories in that rank's i-th micro-batch; may be empty."""


def plan_micro_batches(lengths: Sequence[int], num_ranks: int, tokens_per_micro_batch: int) -> Plan:
    """Split a global batch into the same number of micro-batches on every rank.

    Each rank gets a contiguous part of the batch (which is sorted by group id); within it,
    trajectories of like length share a micro-batch, padded tokens within the budget. Every rank
    computes the whole plan, so that the counts match without a word between ranks: FSDP's
    collectives must.

    Args:
        lengths: prompt plus response of each trajectory, in tokens.
        num_ranks: trainer ranks.
        tokens_per_micro_batch: budget for rows x longest row. A longer trajectory goes alone.

    Returns:
        The plan. Every index appears exactly once; short ranks have empty micro-batches at the end.
    """
    size = len(lengths)
    bounds = [rank * size // num_ranks for rank in range(num_ranks + 1)]
    plan: Plan = []
    for start, stop in pairwise(bounds):
        micro_batches: list[list[int]] = []
        for index in sorted(range(start, stop), key=lambda i: (-lengths[i], i)):
            current = micro_batches[-1] if micro_batches else None
            longest = lengths[current[0]] if current else 0
            if current and (len(current) + 1) * longest <= tokens_per_micro_batch:
                current.append(index)
            else:
                micro_batches.append([index])
        plan.append(micro_batches)
    most = max(len(micro_batches) for micro_batches in plan)
    return [micro_batches + [[]] * (most - len(micro_batches)) for micro_batches in plan]
