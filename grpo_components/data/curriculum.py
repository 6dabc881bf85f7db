"""Draws prompts by their success rates; the same results and seed give the same draws."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grpo_components.settings import CurriculumSettings

MAX_PROMPTS = 10**7
"""Maximum prompts of a curriculum; more are refused."""
_PRIOR_RESPONSES = 0.25
"""Weight, in responses, of the prior that a prompt's success rate is (low + high) / 2."""


def weights_of(rule: CurriculumSettings, rates: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the sampling weight [N] of each prompt from its success rate [N].

    The weight is 1 from `low` to `high`; outside, it falls linearly to `floor` at rates 0 and 1.
    """
    # Only basic operations, which give the same bits on every machine: the audit repeats them.
    below = rates / (rule.low or 1.0)
    above = (1.0 - rates) / ((1.0 - rule.high) or 1.0)
    near = np.where(rates < rule.low, below, np.where(rates > rule.high, above, 1.0))
    return rule.floor + (1.0 - rule.floor) * near


class _Rates:
    """The success rates of one data set's prompts, and how often each was drawn."""

    def __init__(self, prompt_indices: Sequence[int], rule: CurriculumSettings) -> None:
        self.prompt_indices = list(prompt_indices)
        self.draws = np.zeros(len(self.prompt_indices), dtype=np.int64)
        self._successes = np.zeros(len(self.draws))
        self._responses = np.zeros(len(self.draws))
        self._stored = {
            "draws": self.draws,
            "successes": self._successes,
            "responses": self._responses,
        }
        self._rule, self._blocked = rule, np.zeros(len(self.draws), dtype=bool)
        self._weigh()

    def draw(self, share: float) -> tuple[int, int]:
        """Draw a prompt not drawn since the last step, or any if all were; `share` is in [0, 1)."""
        if self._blocked.all():
            self._blocked[:] = False
        cumulated = np.cumsum(np.where(self._blocked, 0.0, self._weights))
        place = int(np.searchsorted(cumulated, share * cumulated[-1], side="right"))
        place = min(place, len(cumulated) - 1)
        while self._blocked[place]:  # the product may round up to the whole sum
            place -= 1
        self._blocked[place] = True
        self.draws[place] += 1
        return self.prompt_indices[place], int(self.draws[place]) - 1

    def end_step(self, results: Mapping[int, tuple[int, int]]) -> None:
        self._successes *= self._rule.decay
        self._responses *= self._rule.decay
        for place, (successes, responses) in results.items():
            self._successes[place] += successes
            self._responses[place] += responses
        self._blocked[:] = False
        self._weigh()

    def _weigh(self) -> None:
        prior = _PRIOR_RESPONSES * ((self._rule.low + self._rule.high) / 2)
        self.rates = (self._successes + prior) / (self._responses + _PRIOR_RESPONSES)
        self._weights = weights_of(self._rule, self.rates)

    def state_dict(self) -> dict[str, list[Any]]:
        known = np.flatnonzero((self.draws > 0) | (self._responses > 0))
        stored = {name: column[known].tolist() for name, column in self._stored.items()}
        return {"places": known.tolist(), **stored}

    def load_state_dict(self, state: Mapping[str, Sequence[Any]]) -> None:
        for name, column in self._stored.items():
            column[:] = 0
            column[np.asarray(state["places"], dtype=np.int64)] = state[name]
        self._blocked[:] = False
        self._weigh()


class PartTurns:
    """Lets k data sets take turns by weight: each gets its share of turns, to within k + 1."""

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        self.taken = [0] * len(weights)
        """Number of turns that each data set has had."""
        self._weights, phases = list(weights), random.Random(seed)
        self._phases = [phases.random() for _ in weights]

    def next(self) -> int:
        """Return the index of the data set whose turn it is, and count the turn."""
        # The k-th turn of a data set is due at time (k + phase) / weight; take the earliest.
        due = [
            (taken + phase) / weight
            for taken, phase, weight in zip(self.taken, self._phases, self._weights, strict=True)
        ]
        number = due.index(min(due))
        self.taken[number] += 1
        return number


class Curriculum:
    """Draws prompts of data sets by weights that depend on the success rate of each prompt.

    The weights change only at the end of a training step, by the results of the groups generated
    since the step before. So the draws depend only on the seed, and each step's results and number
    of draws. Between two steps, no prompt is drawn twice before all prompts of its data set were
    drawn.
    """

    def __init__(
        self, parts: Sequence[tuple[Sequence[int], float]], rule: CurriculumSettings, seed: int
    ) -> None:
        self.rule, self.seed = rule, seed
        self._part_weights = [weight for _, weight in parts]
        self._turns = PartTurns(self._part_weights, seed)
        self._parts = [_Rates(prompt_indices, rule) for prompt_indices, _ in parts]
        self._places = {
            index: (number, place)
            for number, part in enumerate(self._parts)
            for place, index in enumerate(part.prompt_indices)
        }
        self._results: dict[int, tuple[int, int]] = {}
        """prompt_index -> successes and responses since the last step."""
        self.metrics: dict[str, float] = {}
        """Metrics of the last step, by name (`curriculum/...`); empty before the first."""

    def draw(self) -> tuple[int, int]:
        """Return (prompt_index, epoch) of the next prompt; `epoch` counts its earlier draws.

        So no pair of prompt_index and epoch is returned twice.
        """
        number = sum(self._turns.taken)
        digest = hashlib.sha256(f"{self.seed} {number}".encode()).digest()
        share = (int.from_bytes(digest[:8]) >> 11) / 2**53
        return self._parts[self._turns.next()].draw(share)

    def add_result(self, prompt_index: int, successes: int, responses: int) -> None:
        """Add the successes of a generated group; they change weights at the end of the step."""
        before = self._results.get(prompt_index, (0, 0))
        self._results[prompt_index] = before[0] + successes, before[1] + responses

    def end_step(self) -> None:
        """Update the weights by the results since the last step, and compute the metrics."""
        by_part: list[dict[int, tuple[int, int]]] = [{} for _ in self._parts]
        for index, result in self._results.items():
            number, place = self._places[index]
            by_part[number][place] = result
        for part, results in zip(self._parts, by_part, strict=True):
            part.end_step(results)
        successes, responses = (
            sum(column) for column in zip((0, 0), *self._results.values(), strict=True)
        )
        self._results = {}
        tried = np.concatenate([part.draws > 0 for part in self._parts])
        rates = np.concatenate([part.rates for part in self._parts])[tried]
        inside = (rates >= self.rule.low) & (rates <= self.rule.high)
        self.metrics = {
            "curriculum/tried": float(tried.mean()),
            "curriculum/in_band": float(inside.mean()) if len(rates) else math.nan,
            "curriculum/generated_success": successes / responses if responses else math.nan,
        }

    def describe(self) -> dict[str, Any]:
        """Return what decides draws besides results, for receipts.jsonl: seed, rule, prompts."""
        return {
            "seed": self.seed,
            "curriculum": self.rule.model_dump(),
            "prompts": [
                {"weight": weight, "rows": _ranges(part.prompt_indices)}
                for part, weight in zip(self._parts, self._part_weights, strict=True)
            ],
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state between two training steps, as plain values."""
        assert not self._results, "a checkpoint lies between two steps"
        return {
            "turns": list(self._turns.taken),
            "parts": [part.state_dict() for part in self._parts],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of another curriculum over the same prompts."""
        self._turns.taken, self._results = list(state["turns"]), {}
        for part, saved in zip(self._parts, state["parts"], strict=True):
            part.load_state_dict(saved)


def _ranges(numbers: Sequence[int]) -> list[list[int]]:
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ranges
