"""Opens the sender of weights in a trainer's process, where vLLM is imported for it."""

from __future__ import annotations

from typing import Any

BUFFER_BYTES = 256 * 2**20
"""Bytes of one buffer on the GPU, which is filled before it is sent."""


def open_sender(device: str, *, workers: int, host: str) -> Any:
    """Return a `WeightSender`; the driver passes this function on, and never calls it."""
    # Imported here: vLLM takes seconds, and the driver imports this module.
    from grpo_components.training.weight_sender import WeightSender

    return WeightSender(device, workers=workers, host=host, buffer_bytes=BUFFER_BYTES)
