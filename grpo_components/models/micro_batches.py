"""Plans the micro-batches of each rank: which responses share a forward pass."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence

from grpo_components.models.shared_prompts import Part

Plan = list[list[list[int]]]
"""plan[rank][i]: indices of the responses in that rank's i-th micro-batch; may be empty."""
Cost = Callable[[int, int], float]
"""Function: number of tokens, number of tokens before them -> cost to compute them, in any unit."""


def plan_micro_batches(
    parts: Sequence[Part], cost: Cost, num_ranks: int, tokens_per_micro_batch: int
) -> Plan:
    """Split a global batch into the same number of micro-batches on every rank.

    A micro-batch computes each of its prompts once, so responses to one prompt stay together
    unless they exceed the token budget. With several ranks, other plans are tried, which cut the
    responses to one prompt into 2, 4, ... pieces: this balances the load, but computes prompts
    again. The plan with the least time is returned. A round (one micro-batch per rank) takes as
    long as its costliest micro-batch, because ranks wait for each other (FSDP). Every rank computes
    the whole plan, so ranks need not communicate to agree.
    """
    if not parts:
        return [[] for _ in range(num_ranks)]

    def planned(groups: list[list[int]], pieces: int) -> tuple[float, Plan]:
        units = [
            unit
            for group in groups
            for unit in _pieces(group, parts, pieces, tokens_per_micro_batch)
        ]
        batches = _fill(units, parts, cost, num_ranks, tokens_per_micro_batch)
        return _deal(batches, [micro_batch_cost(parts, b, cost) for b in batches], num_ranks)

    groups = _siblings(parts)
    best = planned(groups, 1)
    if num_ranks > 1:  # one rank waits for nobody: recomputed prompts would only cost
        largest = max(map(len, groups))
        for pieces in itertools.takewhile(lambda n: n < 2 * largest, (2**i for i in range(1, 64))):
            tried = planned(groups, pieces)
            if tried[0] >= best[0]:
                break
            best = tried
        best = min(best, planned([[i] for i in range(len(parts))], 1), key=lambda plan: plan[0])
    return best[1]


def micro_batch_cost(parts: Sequence[Part], indices: Sequence[int], cost: Cost) -> float:
    """Return the cost of a micro-batch, which computes each of its prompts once."""
    members = [parts[i] for i in indices]
    prompts = {part.prompt: part.prompt_tokens for part in members}
    total = sum(cost(tokens, 0) for tokens in prompts.values())
    return total + sum(cost(part.response_tokens, part.prompt_tokens) for part in members)


def padded_micro_batches(lengths: Sequence[int], tokens_per_micro_batch: int) -> list[list[int]]:
    """Split sequences into micro-batches of similar lengths, for a model that pads its rows."""
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        longest = lengths[batches[-1][0]] if batches else math.inf
        if not batches or (len(batches[-1]) + 1) * longest > tokens_per_micro_batch:
            batches.append([])
        batches[-1].append(index)
    return batches


def _siblings(parts: Sequence[Part]) -> list[list[int]]:
    """Group the indices of responses to the same prompt, each group sorted from the longest."""
    groups: dict[Hashable, list[int]] = {}
    for index, part in enumerate(parts):
        groups.setdefault(part.prompt, []).append(index)
    return [sorted(group, key=lambda i: -parts[i].response_tokens) for group in groups.values()]


def _pieces(
    group: list[int], parts: Sequence[Part], pieces: int, budget: int
) -> Iterator[list[int]]:
    """Cut a group into about `pieces` lists of similar size, each within the budget if possible."""
    room = budget - parts[group[0]].prompt_tokens
    enough = sum(parts[i].response_tokens for i in group) / pieces
    piece: list[int] = []
    tokens = 0
    for index in group:
        more = parts[index].response_tokens
        if piece and (tokens + more > room or (pieces > 1 and tokens >= enough)):
            yield piece
            piece, tokens = [], 0
        piece.append(index)
        tokens += more
    yield piece


def _fill(
    units: list[list[int]], parts: Sequence[Part], cost: Cost, num_ranks: int, budget: int
) -> list[list[int]]:
    """Pack units (responses that stay together) into as few micro-batches per rank as possible.

    From the costliest on, each unit goes to the cheapest micro-batch so far in which it fits.
    """
    tokens = [micro_batch_cost(parts, unit, lambda new, _: new) for unit in units]
    costs = [micro_batch_cost(parts, unit, cost) for unit in units]
    order = sorted(range(len(units)), key=lambda u: (-costs[u], u))
    enough = math.ceil(len(units) / num_ranks)  # a unit alone always fits
    rounds = min(enough, math.ceil(max(sum(tokens) / budget, 1) / num_ranks))
    while True:
        batches: list[list[int]] = [[] for _ in range(rounds * num_ranks)]
        used = [0.0] * len(batches)
        heap = [(0.0, number) for number in range(len(batches))]
        for unit in order:
            full: list[tuple[float, int]] = []
            while heap and batches[heap[0][1]] and used[heap[0][1]] + tokens[unit] > budget:
                full.append(heapq.heappop(heap))
            if not heap:
                break
            load, number = heapq.heappop(heap)
            batches[number] += units[unit]
            used[number] += tokens[unit]
            for entry in (*full, (load + costs[unit], number)):
                heapq.heappush(heap, entry)
        else:
            return batches
        rounds += 1


def _deal(batches: list[list[int]], costs: list[float], num_ranks: int) -> tuple[float, Plan]:
    """Assign micro-batches to ranks in rounds of similar cost; return the total time and plan."""
    plan: Plan = [[] for _ in range(num_ranks)]
    loads, time = [0.0] * num_ranks, 0.0
    order = sorted(range(len(batches)), key=lambda b: (-costs[b], b))
    for start in range(0, len(order), num_ranks):
        dealt = order[start : start + num_ranks]
        ranks = sorted(range(num_ranks), key=lambda rank: (loads[rank], rank))
        for rank, batch in zip(ranks, dealt, strict=True):
            plan[rank].append(batches[batch])
            loads[rank] += costs[batch]
        time += costs[dealt[0]]
    return time, plan
