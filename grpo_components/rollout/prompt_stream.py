"""The prompts of a run: one data set, epoch after epoch, from a position that can be restored."""

from __future__ import annotations

from typing import Any

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

Prompt = dict[str, Any]


class PromptStream:
    """An endless iterator over (prompt, epoch) pairs.

    Args:
        dataset: rows by index.
        shuffle: another order in every epoch.
        seed: of the orders.
    """

    def __init__(self, dataset: Any, *, shuffle: bool, seed: int) -> None:
        self._num_rows, self._seed = len(dataset), seed
        self._generator = torch.Generator()
        self._loader = StatefulDataLoader(
            dataset, batch_size=None, shuffle=shuffle, generator=self._generator
        )
        self._begin(epoch=0)

    def _begin(self, epoch: int) -> None:
        # A restored loader draws once more from its generator than one that was not interrupted:
        # with one generator for all epochs, the orders of the later ones would be others.
        self._generator.manual_seed(self._seed + epoch)
        self._rows, self._epoch = iter(self._loader), epoch

    def __iter__(self) -> PromptStream:
        return self

    def __next__(self) -> tuple[Prompt, int]:
        while True:
            for row in self._rows:
                return row, self._epoch
            self._begin(self._epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        """Where it is: the loader's state, with the tensor of its random generator."""
        loader = self._loader.state_dict()
        return {"num_rows": self._num_rows, "epoch": self._epoch, "loader": loader}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where another stream over the same data set was.

        Raises:
            ValueError: if the data set has another number of rows.
        """
        if state["num_rows"] != self._num_rows:
            raise ValueError(
                f"dataset: it has {self._num_rows} rows; allowed: the {state['num_rows']} rows "
                "that it had when the checkpoint was written"
            )
        self._loader.load_state_dict(state["loader"])
        self._begin(state["epoch"])
