"""Predicts the GPU buffers with which weights are sent to generators and received there."""

from __future__ import annotations

from grpo_components.models.loading import DTYPES
from grpo_components.rollout.open_sender import BUFFER_BYTES
from grpo_components.settings import Settings
from grpo_tools.memory_plan.model_sizes import ModelSizes


def transfer_bytes(cfg: Settings, sizes: ModelSizes) -> tuple[int, int]:
    """Return the bytes on the GPU of the first trainer rank, and of a worker of a generator.

    As vLLM's source has it: two buffers of NCCL at either end, and the tensors of which the sender
    packs one.
    """
    largest = sizes.dim * max(sizes.vocabulary, sizes.intermediate) * DTYPES[cfg.dtype].itemsize
    if cfg.weights == "nccl":
        return 3 * (BUFFER_BYTES + largest), 2 * (BUFFER_BYTES + largest)
    return 0, 0
