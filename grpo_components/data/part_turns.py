"""Decides which part of a mix of data sets gives the next prompt."""

from __future__ import annotations

import random
from collections.abc import Sequence


class PartTurns:
    """After any n turns, each of k parts has had its share of n to within k + 1 turns."""

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        self.taken = [0] * len(weights)
        """Turns that each part has had."""
        self._weights, phases = list(weights), random.Random(seed)
        self._phases = [phases.random() for _ in weights]

    def next(self) -> int:
        """Return the number of the part whose turn it is, and count the turn."""
        # The k-th turn of a part is due at time (k + phase) / weight; take the earliest.
        due = [
            (taken + phase) / weight
            for taken, phase, weight in zip(self.taken, self._phases, self._weights, strict=True)
        ]
        number = due.index(min(due))
        self.taken[number] += 1
        return number
