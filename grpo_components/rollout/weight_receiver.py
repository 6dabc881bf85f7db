"""Receives weights in vLLM's workers from a trainer, and checks each tensor before it is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from grpo_components.exchange.weights import Manifest, TensorEntry, checksum, hash_values


class IncomingWeights:
    """Describes weights that a trainer will send, and vLLM's communication group for sending."""

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
    """Checks each tensor that vLLM's transfer engine receives, then passes it to the model."""

    def __init__(self, model: Any, entries: Mapping[str, TensorEntry]) -> None:
        self._model, self._entries = model, entries
        self.loaded: set[str] = set()
        """Names of the parameters that got values."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Check each tensor against its manifest entry, and load it; return the loaded names."""
        loaded = self._model.load_weights(self._checked(weights))
        self.loaded |= loaded
        return loaded

    def _checked(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            check_tensor(self._entries[name], tensor)
            yield name, tensor


def check_tensor(entry: TensorEntry, tensor: Tensor) -> None:
    """Raise a ValueError if a received tensor, on any device, lacks the values that were pushed."""
    if tensor.is_cuda:  # a copy to the host would hold up the engine
        is_same = int(hash_values(tensor)) == entry.values
    else:
        raw = tensor.detach().contiguous().flatten().view(torch.uint8).numpy()
        is_same = checksum(entry.name, entry.dtype, entry.shape, raw) == entry.checksum
    if not is_same:
        raise ValueError(f"weight tensor {entry.name} is damaged: checksum mismatch")
