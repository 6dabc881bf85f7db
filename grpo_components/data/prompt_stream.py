"""Streams the prompts of a run without end; the position can be saved and restored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import default_convert

from grpo_components.data.curriculum import Curriculum, PartTurns
from grpo_components.data.prompt_mix import MixedPart, PromptMix
from grpo_components.errors import ConfigError
from grpo_components.settings import CurriculumSettings
from grpo_components.trajectory import Prompt

_SEED_STRIDE = 1_000_003
"""Distance between the seeds of a mix's parts, so that no two parts share an epoch's seed."""


class PromptStream:
    """An endless iterator over (prompt, epoch) pairs.

    Each part of a `PromptMix` repeats its own rows, and `epoch` counts the part's passes. So a
    small part with a large weight is in a later epoch than the others. After any n prompts, each of
    k parts has supplied its share of n to within k + 1 prompts. No pair of prompt_index and epoch
    occurs twice.
    """

    def __init__(self, dataset: Any, *, shuffle: bool, seed: int) -> None:
        self._parts = _parts_of(dataset)
        self._shuffle, self._seed = shuffle, seed
        self._turns = PartTurns([part.weight for part in self._parts], seed)
        self._orders: dict[int, tuple[int, Sequence[int]]] = {}
        """Part number -> its epoch and order of rows, for parts that have supplied a row."""

    def __iter__(self) -> PromptStream:
        return self

    def __next__(self) -> tuple[Prompt, int]:
        number = self._turns.next()
        rows = self._parts[number].rows
        epoch, place = divmod(self._turns.taken[number] - 1, len(rows))
        return converted(rows[self._order(number, epoch)[place]]), epoch

    def _order(self, number: int, epoch: int) -> Sequence[int]:
        known, order = self._orders.get(number, (-1, ()))
        if known != epoch:
            order = range(len(self._parts[number].rows))
            if self._shuffle:
                seed = self._seed + number * _SEED_STRIDE + epoch
                random = torch.Generator().manual_seed(seed)
                order = torch.randperm(len(order), generator=random).tolist()
            self._orders[number] = epoch, order
        return order

    def state_dict(self) -> dict[str, Any]:
        """Return the position: how many prompts were drawn from each part."""
        return {"num_rows": _num_rows(self._parts), "drawn": list(self._turns.taken)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the position of another stream over the same data."""
        _check_num_rows(state, self._parts)
        self._turns.taken = list(state["drawn"])


class PromptCurriculum:
    """An endless iterator over (prompt, epoch) pairs, drawn by the prompts' success rates.

    `epoch` counts the draws of a prompt. No pair of prompt_index and epoch occurs twice.
    """

    def __init__(self, dataset: Any, rule: CurriculumSettings, seed: int) -> None:
        self._parts = _parts_of(dataset)
        weighted: list[tuple[list[int], float]] = []
        self._places: dict[int, tuple[Any, int]] = {}
        """prompt_index -> rows of the prompt's part, and the prompt's place in them."""
        for part in self._parts:
            indices = [int(part.rows[row]["prompt_index"]) for row in range(len(part.rows))]
            self._places |= {index: (part.rows, row) for row, index in enumerate(indices)}
            weighted.append((indices, float(part.weight)))
        self.curriculum = Curriculum(weighted, rule, seed)
        """The curriculum that decides the draws."""

    def __iter__(self) -> PromptCurriculum:
        return self

    def __next__(self) -> tuple[Prompt, int]:
        index, epoch = self.curriculum.draw()
        rows, row = self._places[index]
        return converted(rows[row]), epoch

    def follow(self, event: Mapping[str, Any]) -> None:
        """Update the success rates by a ledger event: a generated group, or a training step."""
        if event["event"] == "finish":
            self.curriculum.add_result(event["prompt"], event["successes"], event["scored"])
        elif event["event"] == "step":
            self.curriculum.end_step()

    def state_dict(self) -> dict[str, Any]:
        """Return the state between two training steps: draws and success rates."""
        return {"num_rows": _num_rows(self._parts), **self.curriculum.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the state of another stream over the same data."""
        _check_num_rows(state, self._parts)
        self.curriculum.load_state_dict(state)


def _parts_of(dataset: Any) -> list[MixedPart]:
    is_mix = isinstance(dataset, PromptMix)
    return [*dataset.parts.values()] if is_mix else [MixedPart(dataset, 1.0, dataset)]


def _num_rows(parts: Sequence[MixedPart]) -> list[int]:
    return [len(part.rows) for part in parts]


def _check_num_rows(state: Mapping[str, Any], parts: Sequence[MixedPart]) -> None:
    had, has = state["num_rows"], _num_rows(parts)
    if had != has:
        rows, before = (" + ".join(map(str, numbers)) for numbers in (has, had))
        raise ConfigError("dataset", f"it has {rows} rows", f"the {before} rows of the checkpoint")


def converted(row: Mapping[str, Any]) -> Prompt:
    """Convert a row's arrays to tensors; skip token ids, since PyTorch would visit each one."""
    is_plain = isinstance(row.get("prompt_ids"), list)
    return {
        name: value if is_plain and name == "prompt_ids" else default_convert(value)
        for name, value in row.items()
    }
