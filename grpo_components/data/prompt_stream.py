"""Streams the prompts of a run without end; the position can be saved and restored."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import default_convert

from grpo_components.data.prompt_mix import MixedPart, PromptMix
from grpo_components.errors import ConfigError
from grpo_components.trajectory import Prompt

_SEED_STRIDE = 1_000_003
"""Distance between the seeds of a mix's parts, so that no two parts share an epoch's seed."""


class PartTurns:
    """Chooses which part (data set) of a mix supplies the next prompt, by the parts' weights."""

    def __init__(self, dataset: Any, seed: int) -> None:
        is_mix = isinstance(dataset, PromptMix)
        self.parts = [*dataset.parts.values()] if is_mix else [MixedPart(dataset, 1.0, dataset)]
        """The parts; a data set that is no mix is the only part."""
        self.num_rows = [len(part.rows) for part in self.parts]
        self.taken = [0] * len(self.parts)
        """Number of times that `next` chose each part."""
        phases = random.Random(seed)
        self._phases = [phases.random() for _ in self.parts]

    def next(self) -> int:
        """Choose the part for the next prompt; return its index in `parts`, and count it."""
        # The k-th turn of a part is due at time (k + phase) / weight; take the earliest.
        turns = zip(self.taken, self._phases, self.parts, strict=True)
        due = [(taken + phase) / part.weight for taken, phase, part in turns]
        number = due.index(min(due))
        self.taken[number] += 1
        return number

    def restore(self, num_rows: list[int], taken: Sequence[int]) -> None:
        """Continue from saved counts (`taken`); refuse them if the numbers of rows have changed."""
        if num_rows != self.num_rows:
            rows, before = (" + ".join(map(str, each)) for each in (self.num_rows, num_rows))
            allowed = f"the {before} rows of the checkpoint"
            raise ConfigError("dataset", f"it has {rows} rows", allowed)
        self.taken = list(taken)


class PromptStream:
    """An endless iterator over (prompt, epoch) pairs.

    Each part of a `PromptMix` repeats its own rows, and `epoch` counts the part's passes. So a
    small part with a large weight is in a later epoch than the others. After any n prompts, each of
    k parts has supplied its share of n to within k + 1 prompts. No pair of prompt_index and epoch
    occurs twice.
    """

    def __init__(self, dataset: Any, *, shuffle: bool, seed: int) -> None:
        self._turns = PartTurns(dataset, seed)
        self._shuffle, self._seed = shuffle, seed
        self._orders: dict[int, tuple[int, Sequence[int]]] = {}
        """Part number -> its epoch and order of rows, for parts that have supplied a row."""

    def __iter__(self) -> PromptStream:
        return self

    def __next__(self) -> tuple[Prompt, int]:
        number = self._turns.next()
        rows = self._turns.parts[number].rows
        epoch, place = divmod(self._turns.taken[number] - 1, len(rows))
        return converted(rows[self._order(number, epoch)[place]]), epoch

    def _order(self, number: int, epoch: int) -> Sequence[int]:
        known, order = self._orders.get(number, (-1, ()))
        if known != epoch:
            order = range(self._turns.num_rows[number])
            if self._shuffle:
                seed = self._seed + number * _SEED_STRIDE + epoch
                generator = torch.Generator().manual_seed(seed)
                order = torch.randperm(len(order), generator=generator).tolist()
            self._orders[number] = epoch, order
        return order

    def state_dict(self) -> dict[str, Any]:
        """Return the position: how many prompts were drawn from each part."""
        return {"num_rows": self._turns.num_rows, "drawn": list(self._turns.taken)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the position of another stream over the same data."""
        self._turns.restore(state["num_rows"], state["drawn"])


def converted(row: Mapping[str, Any]) -> Prompt:
    """Convert a row's NumPy arrays to tensors; for speed, skip token ids that are a list."""
    is_plain = isinstance(row.get("prompt_ids"), list)
    return {
        name: value if is_plain and name == "prompt_ids" else default_convert(value)
        for name, value in row.items()
    }
