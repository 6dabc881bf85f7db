"""The times of a run's roles, and the lengths of its responses: what a simulation is made from."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step of an engine, and those more for a sequence and for a prompt it reads."""

    per_step: float
    per_sequence: float
    per_prompt: float

    def of(self, sequences: int, prompts: float = 0) -> float:
        """Return the seconds of a step with so many sequences and new prompts."""
        return self.per_step + self.per_sequence * sequences + self.per_prompt * prompts


@dataclass(frozen=True)
class Times:
    """Fitted seconds of one run."""

    engine_step: StepTime
    collect_s: float
    """A generator's work for each response outside the engine: environment, packing."""
    reward_s: float
    """From a group's last token to its last reward, without the generator's own work."""
    load_s: float
    """Swap of an engine's weights."""
    update_s: float
    """Fixed part of a training step: the optimizer."""
    train_s_per_token: float
    """Part of a training step for each token of prompts and responses."""
    train_scatter: tuple[float, ...]
    """Seconds of each recorded step, relative to the fitted ones."""
    prompt_tokens: float
    """Mean tokens of a prompt; trainer and reference compute a group's prompt once."""
    gather_s: float
    """Gather of the weights for a push."""
    export_s: float
    """Packing of the weights, beside the next step."""
    reference_s_per_token: float
    """A reference's seconds for each token of prompts and responses."""

    def train(self, response_tokens: int, groups: float, ranks: int) -> float:
        """Return the seconds of a training step."""
        tokens = response_tokens + groups * self.prompt_tokens
        return self.update_s + self.train_s_per_token * tokens / ranks

    def reference(self, response_tokens: float) -> float:
        """Return the seconds of a group's reference logprobs."""
        return self.reference_s_per_token * (response_tokens + self.prompt_tokens)


class Lengths:
    """Draws the lengths of a group's responses from those of recorded groups, cut at `longest`.

    A group id gives the same lengths in every simulation, so that they can be compared.
    """

    def __init__(self, groups: Sequence[Sequence[int]], longest: int, seed: int) -> None:
        self._seed = seed
        self._groups = [[max(1, min(tokens, longest)) for tokens in group] for group in groups]
        self.mean = statistics.fmean(tokens for group in self._groups for tokens in group)

    def of_group(self, group_id: int, size: int) -> list[int]:
        """Return the lengths of a group's responses, in tokens."""
        draw = random.Random(f"{self._seed} {group_id}")
        recorded = draw.choice(self._groups)
        if size <= len(recorded):
            return draw.sample(recorded, size)
        return draw.choices(recorded, k=size)
