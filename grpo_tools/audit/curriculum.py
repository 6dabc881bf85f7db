"""Recomputes a curriculum's draws by the rule of docs/data.md, without using the run's code."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from grpo_components.files import Record

FIELDS = "seed", "curriculum", "prompts"
"""Fields of a start record that only a run with a curriculum has."""
_MOST_PROMPTS = 10**7
_LARGEST_ROW = 2**53


@dataclass
class DataSet:
    """A data set of a run, and its share of the draws."""

    prompts: slice
    """Positions of its prompts among the N prompts of all data sets."""
    weight: float
    phase: float
    """From 0 to 1. The data set with the least (turns + phase) / weight is drawn from next."""
    turns: int = 0
    """Number of its draws so far."""


@dataclass
class Draws:
    """State of a curriculum: all that the next draw depends on."""

    seed: int
    rule: dict[str, float]
    data_sets: list[DataSet]
    rows: NDArray[np.int64]
    """prompt_index of each prompt [N]."""
    epochs: NDArray[np.int64]
    """How often each prompt was drawn [N]."""
    ready: NDArray[np.bool_]
    """Whether a prompt may be drawn: once per step, or again if its data set is used up [N]."""
    counts: NDArray[np.float64]
    """Successes and responses of each prompt in earlier steps, decayed by age [2, N]."""
    weights: NDArray[np.float64]
    """Sampling weight of each prompt [N]."""
    places: dict[int, int] = field(default_factory=dict)
    """prompt_index of each prompt drawn so far -> its position among the N prompts."""
    results: list[tuple[int, int, int]] = field(default_factory=list)
    """(prompt_index, successes, responses) since the last step."""


def first_draws(start: Record) -> Draws:
    """Return the state before a run's first draw; raise a ValueError for an invalid `start`."""
    seed, rule, parts = (start.get(name) for name in FIELDS)
    if seed is None or not rule or not parts:
        raise ValueError(f"the start lacks one of {', '.join(FIELDS)}")
    ordered = 0 <= rule["low"] <= rule["high"] <= 1
    if not (ordered and 0.001 <= rule["floor"] <= 1 and 0.01 <= rule["decay"] <= 1):
        raise ValueError(f"the rule {rule} is impossible")
    ranges = [pair for part in parts for pair in part["rows"]]
    if not all(first <= last <= _LARGEST_ROW for first, last in ranges):
        raise ValueError("the rows of a data set are impossible")
    sizes = [sum(last - first + 1 for first, last in part["rows"]) for part in parts]
    if min(sizes) == 0 or sum(sizes) > _MOST_PROMPTS:
        raise ValueError(f"a data set has no row, or all have more than {_MOST_PROMPTS}")
    if not all(part["weight"] > 0 for part in parts):
        raise ValueError("the weight of a data set is impossible")
    number = sum(sizes)
    every_row = (row for first, last in ranges for row in range(first, last + 1))
    rows = np.fromiter(every_row, np.int64, number)
    if len(np.unique(rows)) < number:
        raise ValueError("two prompts have the same prompt_index")
    phases, end, data_sets = random.Random(seed), 0, list[DataSet]()
    for part, size in zip(parts, sizes, strict=True):
        data_sets.append(DataSet(slice(end, end + size), part["weight"], phases.random()))
        end += size
    counts, epochs = np.zeros((2, number)), np.zeros(number, np.int64)
    ready, weights = np.ones(number, bool), _weights(counts, rule)
    return Draws(seed, rule, data_sets, rows, epochs, ready, counts, weights)


def draw(draws: Draws) -> tuple[int, int]:
    """Draw the next prompt; return its prompt_index and epoch."""
    number = sum(each.turns for each in draws.data_sets)
    digest = hashlib.sha256(f"{draws.seed} {number}".encode()).hexdigest()
    share = (int(digest[:16], 16) >> 11) / 2**53  # the first 53 bits, as a number below 1
    chosen = min(draws.data_sets, key=lambda each: (each.turns + each.phase) / each.weight)
    chosen.turns += 1
    ready, weights = draws.ready[chosen.prompts], draws.weights[chosen.prompts]
    if not ready.any():
        ready[:] = True
    sums = np.cumsum(weights * ready)
    place = np.count_nonzero(sums <= share * sums[-1])
    if place == len(sums):  # the product was rounded up to the whole sum
        place = np.flatnonzero(ready)[-1]
    ready[place] = False
    place = chosen.prompts.start + int(place)
    row, epoch = int(draws.rows[place]), int(draws.epochs[place])
    draws.places[row] = place
    draws.epochs[place] += 1
    return row, epoch


def end_step(draws: Draws) -> None:
    """End a step: recompute each prompt's sampling weight with the results since the last step."""
    new = np.zeros_like(draws.counts)
    for row, successes, responses in draws.results:
        if row in draws.places:
            new[:, draws.places[row]] += successes, responses
    draws.counts = draws.counts * draws.rule["decay"] + new
    draws.weights = _weights(draws.counts, draws.rule)
    draws.ready[:] = True
    draws.results.clear()


def _weights(counts: NDArray[np.float64], rule: dict[str, float]) -> NDArray[np.float64]:
    low, high, floor = rule["low"], rule["high"], rule["floor"]
    # Bits matter: another order of operations could draw another prompt.
    rates = (counts[0] + (low + high) / 2 / 4) / (counts[1] + 1 / 4)
    near = np.ones_like(rates)  # 1 from low to high, 0 at the rates 0 and 1
    if low > 0:
        near = np.minimum(near, rates / low)
    if high < 1:
        near = np.minimum(near, (1 - rates) / (1 - high))
    return floor + (1 - floor) * near
