"""Draws prompts for training; those too easy or too hard for the policy come less often."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grpo_components.data.prompt_mix import MixedPart
from grpo_components.data.prompt_stream import PartTurns, converted
from grpo_components.settings import CurriculumSettings
from grpo_components.trajectory import Prompt

MAX_PROMPTS = 10**7
"""Maximum prompts of a curriculum; more are refused."""
_PRIOR_RESPONSES = 0.25
"""Weight, in responses, of the prior that a prompt's success rate is (low + high) / 2."""
_STORED = ("draws", "successes", "responses")
"""Arrays of `_Rates`, with one value per prompt, that its `state_dict` stores."""


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

    def __init__(self, size: int, rule: CurriculumSettings) -> None:
        self.draws = np.zeros(size, dtype=np.int64)
        self.successes, self.responses = np.zeros(size), np.zeros(size)
        self._rule, self._blocked = rule, np.zeros(size, dtype=bool)
        self._weigh()

    def draw(self, share: float) -> tuple[int, int]:
        """Draw a prompt by weight, and none twice between two steps unless all were drawn.

        `share`, a random number in [0, 1), decides which prompt it is. Returns the prompt's place
        in the data set, and how often it was drawn before.
        """
        if self._blocked.all():
            self._blocked[:] = False
        cumulated = np.cumsum(np.where(self._blocked, 0.0, self._weights))
        place = int(np.searchsorted(cumulated, share * cumulated[-1], side="right"))
        place = min(place, len(cumulated) - 1)
        while self._blocked[place]:  # the product may round up to the whole sum
            place -= 1
        self._blocked[place] = True
        self.draws[place] += 1
        return place, int(self.draws[place]) - 1

    def end_step(self, results: Mapping[int, tuple[int, int]]) -> None:
        self.successes *= self._rule.decay
        self.responses *= self._rule.decay
        for place, (successes, responses) in results.items():
            self.successes[place] += successes
            self.responses[place] += responses
        self._blocked[:] = False
        self._weigh()

    def _weigh(self) -> None:
        prior = _PRIOR_RESPONSES * ((self._rule.low + self._rule.high) / 2)
        self.rates = (self.successes + prior) / (self.responses + _PRIOR_RESPONSES)
        self._weights = weights_of(self._rule, self.rates)

    def state_dict(self) -> dict[str, list[Any]]:
        known = np.flatnonzero((self.draws > 0) | (self.responses > 0))
        stored = {name: getattr(self, name)[known].tolist() for name in _STORED}
        return {"places": known.tolist(), **stored}

    def load_state_dict(self, state: Mapping[str, Sequence[Any]]) -> None:
        for name in _STORED:
            column = getattr(self, name)
            column[:] = 0
            column[np.asarray(state["places"], dtype=np.int64)] = state[name]
        self._blocked[:] = False
        self._weigh()


class PromptCurriculum:
    """An endless iterator over (prompt, epoch) pairs, drawn by the prompts' success rates.

    `epoch` counts the earlier draws of the prompt, so no pair of prompt_index and epoch occurs
    twice. The sampling weights (see `weights_of`) change only at the end of a training step, by the
    results (successes and responses) of the groups generated since the step before. So the draws
    depend only on the seed, and on each step's results and number of draws. Between two steps, no
    prompt is drawn twice before all prompts of its data set were drawn.
    """

    def __init__(self, dataset: Any, rule: CurriculumSettings, seed: int) -> None:
        self.rule, self.seed = rule, seed
        self._turns = PartTurns(dataset, seed)
        self._rates = [_Rates(size, rule) for size in self._turns.num_rows]
        self._places = {
            index: (number, row)
            for number, part in enumerate(self._turns.parts)
            for row, index in enumerate(_indices_of(part))
        }
        """prompt_index -> number of the prompt's data set in the mix, and its row there."""
        self._results: dict[int, tuple[int, int]] = {}
        """prompt_index -> successes and responses since the last step."""
        self.metrics: dict[str, float] = {}
        """Metrics of the last step, by name (`curriculum/...`); empty before the first."""

    def __iter__(self) -> PromptCurriculum:
        return self

    def __next__(self) -> tuple[Prompt, int]:
        digest = hashlib.sha256(f"{self.seed} {sum(self._turns.taken)}".encode()).digest()
        share = (int.from_bytes(digest[:8]) >> 11) / 2**53
        number = self._turns.next()
        row, epoch = self._rates[number].draw(share)
        return converted(self._turns.parts[number].rows[row]), epoch

    def follow(self, event: Mapping[str, Any]) -> None:
        """Update from one event of the run: a generated group's successes, or the end of a step."""
        if event["event"] == "finish":
            self.add_result(event["prompt"], event["successes"], event["scored"])
        elif event["event"] == "step":
            self.end_step()

    def add_result(self, prompt_index: int, successes: int, responses: int) -> None:
        """Count a generated group's successes; `end_step` changes the sampling weights by them."""
        before = self._results.get(prompt_index, (0, 0))
        self._results[prompt_index] = before[0] + successes, before[1] + responses

    def end_step(self) -> None:
        """Update all sampling weights by the successes since the last step; compute `metrics`."""
        by_part: list[dict[int, tuple[int, int]]] = [{} for _ in self._rates]
        for index, result in self._results.items():
            number, row = self._places[index]
            by_part[number][row] = result
        for rates, results in zip(self._rates, by_part, strict=True):
            rates.end_step(results)
        successes, responses = (
            sum(column) for column in zip((0, 0), *self._results.values(), strict=True)
        )
        self._results = {}
        tried = np.concatenate([part.draws > 0 for part in self._rates])
        rates = np.concatenate([part.rates for part in self._rates])[tried]
        inside = (rates >= self.rule.low) & (rates <= self.rule.high)
        self.metrics = {
            "curriculum/tried": float(tried.mean()),
            "curriculum/in_band": float(inside.mean()) if len(rates) else math.nan,
            "curriculum/generated_success": successes / responses if responses else math.nan,
        }

    def describe(self) -> dict[str, Any]:
        """Return the settings that decide the draws, for receipts.jsonl: seed, rule and rows."""
        return {
            "seed": self.seed,
            "curriculum": self.rule.model_dump(),
            "prompts": [
                {"weight": float(part.weight), "rows": _ranges(_indices_of(part))}
                for part in self._turns.parts
            ],
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state between two training steps, as plain values: draws and results."""
        assert not self._results, "a checkpoint lies between two steps"
        return {
            "num_rows": self._turns.num_rows,
            "turns": list(self._turns.taken),
            "parts": [rates.state_dict() for rates in self._rates],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of another stream over the same data."""
        self._turns.restore(state["num_rows"], state["turns"])
        self._results = {}
        for rates, saved in zip(self._rates, state["parts"], strict=True):
            rates.load_state_dict(saved)


def _indices_of(part: MixedPart) -> list[int]:
    return [int(part.rows[row]["prompt_index"]) for row in range(len(part.rows))]


def _ranges(numbers: Sequence[int]) -> list[list[int]]:
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ranges
