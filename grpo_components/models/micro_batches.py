"""Plans which trajectories share a forward pass, by rank, length and token budget."""

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

    Trajectories are dealt in rounds, from the longest to the shortest. A round deals one to each
    rank, the costliest to the rank with the least cost so far. So the costs of two ranks differ by
    at most the costliest trajectory, and their numbers of trajectories by at most one. The i-th
    micro-batches of all ranks have similar lengths; otherwise ranks would wait for the slowest in
    FSDP's collectives. Every rank computes the whole plan, so ranks agree without communication.

    Args:
        lengths: prompt plus response of each trajectory, in tokens.
        costs: cost of each trajectory, in any unit; a longer trajectory must not cost less.
        num_ranks: number of trainer ranks.
        tokens_per_micro_batch: limit of rows x longest row, or of the sum of lengths if packed. A
            trajectory over the limit gets a micro-batch of its own.
        packed: pack each micro-batch into one row.

    Returns:
        The plan. Every index appears exactly once; the last micro-batch of some ranks may be
        empty.
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
        candidates = rounds if packed else rounds[-1:]  # if padded, no earlier round has room
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
