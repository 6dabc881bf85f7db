"""The times of a run's roles, and the lengths of its responses: what the twin is fitted from."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from grpo_components.twin.virtual_engine import StepTime


@dataclass(frozen=True)
class Times:
    """Fitted times of one run, in CPU seconds if its roles share cores, else in seconds."""

    engine_step: StepTime
    """One step of a generator's engine."""
    collect_s: float
    """A generator's CPU seconds for each response outside the engine: environment, packing."""
    reward_s: float
    """Seconds from a group's last token to its last reward, without the generator's own."""
    load_s: float
    """Swap of an engine's weights."""
    fetch_s: float
    """Transfer and check of the weights, before they are swapped."""
    update_s: float
    """Fixed part of a training step: the optimizer."""
    train_s_per_token: float
    """Part of a training step for each token of prompts and responses."""
    train_scatter: tuple[float, ...]
    """Seconds of each recorded step, relative to the fitted ones."""
    prompt_tokens: float
    """Mean tokens of a prompt; a group's prompt is trained once."""
    gather_s: float
    """Gather of the weights for a push."""
    export_s: float
    """Packing of the weights, beside the next step."""
    reference_s_per_token: float
    """A reference's seconds for each token."""
    call_s: float
    """Driver's CPU seconds to send a call and receive its result."""
    receive_s: float
    """CPU seconds of a role's process for each call, besides the call itself."""
    trainer_threads: float = 1.0
    """Cores that a training step keeps busy."""
    engine_threads: float = 1.0
    """Cores that an engine step keeps busy."""

    def train(self, response_tokens: int, groups: float, ranks: int) -> float:
        """Return the seconds of a training step."""
        tokens = response_tokens + groups * self.prompt_tokens
        return self.update_s + self.train_s_per_token * tokens / ranks

    def scaled(self, factor: float) -> Times:
        """Return the times multiplied by a factor."""
        step = self.engine_step
        changed = {
            each.name: getattr(self, each.name) * factor
            for each in fields(self)
            if each.name.endswith("_s") or each.name.endswith("_s_per_token")
        }
        step = StepTime(
            step.per_step * factor, step.per_sequence * factor, step.per_prompt * factor
        )
        return replace(self, engine_step=step, **changed)


class Lengths:
    """Draws the lengths of a group's responses from those of recorded groups.

    A group id gives the same lengths in every run of the twin, so that runs can be compared.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[int]],
        *,
        seed: int,
        scale: float = 1.0,
        tail: float = 1.0,
        longest: int | None = None,
    ) -> None:
        ordered = sorted(tokens for group in groups for tokens in group)
        median = ordered[len(ordered) // 2]

        def changed(tokens: int) -> int:
            stretched = scale * (min(tokens, median) + tail * max(0, tokens - median))
            return max(1, min(round(stretched), longest or round(stretched)))

        self._groups = [[changed(tokens) for tokens in group] for group in groups]
        self._seed = seed
        everything = [tokens for group in self._groups for tokens in group]
        self.mean = sum(everything) / len(everything)
        """Mean tokens of a response."""

    def of_group(self, group_id: int, size: int) -> list[int]:
        """Return the lengths of a group's responses, in tokens."""
        draw = random.Random(f"{self._seed} {group_id}")
        recorded = draw.choice(self._groups)
        if size <= len(recorded):
            return draw.sample(recorded, size)
        return draw.choices(recorded, k=size)
