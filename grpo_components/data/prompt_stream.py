"""The endless stream of a run's prompts, with a position that can be saved and restored."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import default_convert
from torchdata.stateful_dataloader import StatefulDataLoader

from grpo_components.data.part_turns import PartTurns
from grpo_components.data.prompt_mix import MixedPart, PromptMix
from grpo_components.errors import ConfigError

Prompt = dict[str, Any]
_SEED_STRIDE = 1_000_003
"""Distance between the seeds of a mix's parts, so that no two parts share an epoch's seed."""


class PromptStream:
    """An endless iterator over (prompt, epoch) pairs.

    Each part of a `PromptMix` repeats its own rows, and `epoch` counts its passes, so a small part
    with a large weight is in a later epoch than the others. After any n prompts, each of k parts
    has given its share of n to within k + 1 prompts. A pair of prompt_index and epoch never occurs
    twice.
    """

    def __init__(self, dataset: Any, *, shuffle: bool, seed: int) -> None:
        mixed = isinstance(dataset, PromptMix)
        parts = list(dataset.parts.values()) if mixed else [MixedPart(dataset, 1.0, 0)]
        self._passes = [
            _Passes(part, shuffle, seed + number * _SEED_STRIDE)
            for number, part in enumerate(parts)
        ]
        self._turns = PartTurns([part.weight for part in parts], seed)

    def __iter__(self) -> PromptStream:
        return self

    def __next__(self) -> tuple[Prompt, int]:
        return next(self._passes[self._turns.next()])

    def state_dict(self) -> dict[str, Any]:
        """Return the position: prompts drawn from each part, and the state of each loader."""
        drawn = list(self._turns.taken)
        return {"drawn": drawn, "parts": [part.state_dict() for part in self._passes]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the position of another stream over the same data."""
        had, has = ([p["num_rows"] for p in state["parts"]], [p.num_rows for p in self._passes])
        if had != has:
            rows, before = (" + ".join(map(str, numbers)) for numbers in (has, had))
            raise ConfigError(
                "dataset", f"it has {rows} rows", f"the {before} rows of the checkpoint"
            )
        self._turns.taken = list(state["drawn"])
        for part, position in zip(self._passes, state["parts"], strict=True):
            part.load_state_dict(position)


def converted(row: Any) -> Any:
    """Return a row as PyTorch's own `default_convert` does, which visits every token id."""
    if not isinstance(row, dict) or not isinstance(row.get("prompt_ids"), list):
        return default_convert(row)
    others = {name: value for name, value in row.items() if name != "prompt_ids"}
    converted = default_convert(others) | {"prompt_ids": list(row["prompt_ids"])}
    return {name: converted[name] for name in row}


class _Passes:
    """Repeats one data set endlessly; if shuffled, in another order in each epoch."""

    def __init__(self, dataset: Any, shuffle: bool, seed: int) -> None:
        self.num_rows, self._seed = len(dataset), seed
        self._generator = torch.Generator()
        self._loader = StatefulDataLoader(
            dataset,
            batch_size=None,
            shuffle=shuffle,
            generator=self._generator,
            collate_fn=converted,
        )
        self._begin(epoch=0)

    def _begin(self, epoch: int) -> None:
        # Reseed in each epoch: a restored loader draws once more from its generator than an
        # uninterrupted one does. Without a new seed, all later epochs would get another order.
        self._generator.manual_seed(self._seed + epoch)
        self._rows, self._epoch = iter(self._loader), epoch

    def __next__(self) -> tuple[Prompt, int]:
        while True:
            for row in self._rows:
                return row, self._epoch
            self._begin(self._epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        loader = self._loader.state_dict()
        return {"num_rows": self.num_rows, "epoch": self._epoch, "loader": loader}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loader.load_state_dict(state["loader"])
        self._begin(state["epoch"])
