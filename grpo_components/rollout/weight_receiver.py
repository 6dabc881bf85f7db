"""Receives weights in vLLM's workers from a trainer, and checks each tensor before it is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from grpo_components.exchange.weights import Manifest, TensorEntry, checksum, hash_values


class IncomingWeights:
    """Weights that a trainer is about to send, and vLLM's description of its transfer group."""

    def __init__(
        self, manifests: Iterable[Manifest], group: dict[str, Any], awaited: Future[None]
    ) -> None:
        self.group, self.entries = group, dict[str, TensorEntry]()
        self.awaited = awaited
        """Set once the engine waits for the first tensor."""
        for entry in (entry for manifest in manifests for entry in manifest):
            if entry.name in self.entries:
                raise ValueError(f"weight tensor {entry.name} appears twice")
            self.entries[entry.name] = entry

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each announced tensor, by its Hugging Face name."""
        return {name: entry.shape for name, entry in self.entries.items()}


class CheckedModel:
    """Stands between a transfer engine and the model: passes on what has the right checksum."""

    def __init__(self, model: Any, entries: Mapping[str, TensorEntry]) -> None:
        self._model, self._left = model, dict(entries)
        self._loaded: set[str] = set()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load tensors, each if it is the one that was pushed; return what was loaded."""
        loaded = self._model.load_weights(self._checked(weights))
        self._loaded |= loaded
        return loaded

    def loaded(self) -> set[str]:
        """Return the names of the parameters that got values, once every tensor has come."""
        for name in sorted(self._left):
            raise ValueError(f"weight tensor {name} did not arrive")
        return self._loaded

    def _checked(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            entry = self._left.pop(name, None)
            if entry is None:
                raise ValueError(f"weight tensor {name} is unknown or appears twice")
            check_tensor(entry, tensor)
            yield name, tensor


def check_tensor(entry: TensorEntry, tensor: Tensor) -> None:
    """Check that a tensor, on any device, is the one that was pushed."""
    dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    if (dtype, shape) != (entry.dtype, entry.shape):
        pushed = f"{entry.dtype} {list(entry.shape)} was pushed"
        raise ValueError(f"weight tensor {entry.name} arrived as {dtype} {list(shape)}, {pushed}")
    if tensor.is_cuda:  # a copy to the host would hold up the engine
        is_same = int(hash_values(tensor)) == entry.values
    else:
        raw = tensor.detach().contiguous().flatten().view(torch.uint8).numpy()
        is_same = checksum(entry.name, dtype, shape, raw) == entry.checksum
    if not is_same:
        raise ValueError(f"weight tensor {entry.name} is damaged: checksum mismatch")
