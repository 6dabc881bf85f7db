"""Which trajectories share a forward pass: whole batches split by rank, length and token budget."""

from __future__ import annotations

from collections.abc import Sequence

Plan = list[list[list[int]]]
"""plan[rank][i]: indices of the trajectories in that rank's i-th micro-batch; may be empty."""


def plan_micro_batches(
    lengths: Sequence[int],
    costs: Sequence[float],
    num_ranks: int,
    tokens_per_micro_batch: int,
    *,
    packed: bool = False,
) -> Plan:
    """Split a global batch into the same number of micro-batches on every rank.

    Trajectories are dealt out from the longest to the shortest, one to each rank at a time, the
    costliest of them to the rank that has the least so far. So the costs of two ranks never differ
    by more than the costliest trajectory, their numbers of trajectories by at most one, and the
    i-th micro-batches of all ranks, which meet in FSDP's collectives, hold like lengths. Every rank
    computes the whole plan, so that the counts match without a word between ranks.

    Args:
        lengths: prompt plus response of each trajectory, in tokens.
        costs: of each trajectory, in any unit; not smaller for a longer one.
        num_ranks: trainer ranks.
        tokens_per_micro_batch: budget for rows x longest row, or for the sum of lengths where
            trajectories are packed. A longer trajectory goes alone.
        packed: micro-batches are packed into one row.

    Returns:
        The plan. Every index appears exactly once; where trajectories run out, some ranks' micro-
        batch is empty.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    loads = [0.0] * num_ranks
    rounds: list[list[list[int]]] = []  # rounds[i][rank]: a micro-batch

    def fits(micro_batch: list[int], index: int) -> bool:
        if packed:
            tokens = sum(lengths[i] for i in micro_batch) + lengths[index]
        else:
            tokens = (len(micro_batch) + 1) * lengths[(micro_batch or [index])[0]]
        return tokens <= tokens_per_micro_batch

    for start in range(0, len(order), num_ranks):
        dealt = order[start : start + num_ranks]
        ranks = sorted(range(num_ranks), key=lambda rank: (loads[rank], rank))[: len(dealt)]
        pairs = list(zip(ranks, dealt, strict=True))
        candidates = rounds if packed else rounds[-1:]  # padded, no earlier one has room
        for micro_batches in candidates:
            if all(fits(micro_batches[rank], index) for rank, index in pairs):
                break
        else:
            micro_batches = [[] for _ in range(num_ranks)]
            rounds.append(micro_batches)
        for rank, index in pairs:
            micro_batches[rank].append(index)
            loads[rank] += costs[index]
    return [[micro_batches[rank] for micro_batches in rounds] for rank in range(num_ranks)]
