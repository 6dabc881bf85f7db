"""Floating-point operations that training takes, and peak rates of GPUs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

from torch import nn

_PEAK_TFLOPS = (
    (r"B200", 2250.0, 80.0),
    (r"H200|H100.*(HBM3|SXM)|GH200", 989.4, 66.9),
    (r"H100 NVL", 835.0, 60.0),
    (r"H100.*PCIe", 756.0, 51.2),
    (r"A100", 312.0, 19.5),
    (r"L40S", 362.0, 91.6),
    (r"L40\b", 181.0, 90.5),
    (r"L4\b", 121.0, 30.3),
    (r"A10\b", 125.0, 31.2),
    (r"RTX A6000", 154.8, 38.7),
    (r"RTX 4090$", 165.2, 82.6),
    (r"RTX 3090$", 71.0, 35.6),
)
"""Pattern in the GPU's name, then peak TFLOP/s in bf16 (tensor cores, float32 accumulation, no
sparsity) and in float32 (no TF32), from NVIDIA's data sheets."""


def peak_flops(gpu_name: str, dtype: str) -> float | None:
    """Peak floating-point operations per second of a GPU; None for an unknown one.

    Args:
        gpu_name: as `torch.cuda.get_device_name` returns it.
        dtype: compute dtype, fp32 or bf16.
    """
    for pattern, bf16, fp32 in _PEAK_TFLOPS:
        if re.search(pattern, gpu_name):
            return {"bf16": bf16, "fp32": fp32}[dtype] * 1e12
    return None


@dataclass(frozen=True)
class ModelFlops:
    """Floating-point operations of one forward pass; a multiply-add counts as two.

    Counts matrix products, as in the appendix of PaLM (arXiv 2204.02311), but only what is computed
    here: a query attends to its own and earlier keys, and only wanted tokens are projected to the
    vocabulary. The backward pass takes twice as many. Not counted: recomputation (activation
    checkpointing, chunks of logprobs), padding, and everything else (norms, softmax, optimizer).
    """

    per_token: float
    """2 x weights of all matrices in the layers."""
    per_pair: float
    """Per query-key pair: 4 x heads x head dimension x layers, for scores and values."""
    per_logprob: float
    """2 x embedding dimension x vocabulary."""

    @classmethod
    def of(cls, model: nn.Module) -> ModelFlops:
        """Read the sizes from a torchtune decoder, sharded or not."""
        decoder = cast(Any, model)
        matrices = [m.weight for m in decoder.layers.modules() if isinstance(m, nn.Linear)]
        attention = [layer.attn for layer in decoder.layers]
        vocabulary, dim = decoder.tok_embeddings.weight.shape
        return cls(
            per_token=2.0 * sum(weight.numel() for weight in matrices),
            per_pair=4.0 * sum(attn.num_heads * attn.head_dim for attn in attention),
            per_logprob=2.0 * vocabulary * dim,
        )

    def forward(self, length: int, num_logprobs: int = 0) -> float:
        """Operations of one sequence's forward pass.

        Args:
            length: T tokens, which make T (T + 1) / 2 pairs of query and key.
            num_logprobs: tokens whose logprob is computed.
        """
        pairs = length * (length + 1) / 2
        return self.per_token * length + self.per_pair * pairs + self.per_logprob * num_logprobs

    def train(self, sequences: Iterable[tuple[int, int]]) -> float:
        """Operations of the sequences' forward and backward passes.

        Args:
            sequences: length and number of logprobs of each.
        """
        return 3.0 * sum(self.forward(*sequence) for sequence in sequences)
