"""How many floating-point operations training takes, and how many a GPU can do at most."""

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
"""Pattern in the GPU's name, then 10^12 operations per second in bf16 (tensor cores, accumulated in
float32, without sparsity) and in float32 (without TF32), from NVIDIA's data sheets."""


def peak_flops(gpu_name: str, dtype: str) -> float | None:
    """Floating-point operations per second that a GPU can do at most; None for an unknown one.

    Args:
        gpu_name: what `torch.cuda.get_device_name` says.
        dtype: compute dtype, fp32 or bf16.
    """
    for pattern, bf16, fp32 in _PEAK_TFLOPS:
        if re.search(pattern, gpu_name):
            return {"bf16": bf16, "fp32": fp32}[dtype] * 1e12
    return None


@dataclass(frozen=True)
class ModelFlops:
    """Floating-point operations of one forward pass; a multiply-add counts as two.

    Counted are the matrix products, as in the appendix of PaLM (arXiv 2204.02311), but with what is
    computed here and no more: a query meets its own and earlier keys only, and only wanted tokens
    are projected to the vocabulary. Backward takes twice as many. What is computed a second time
    (activation checkpointing, chunks of logprobs), padding, and what is no matrix product (norms,
    softmax, the optimizer) count as nothing.
    """

    per_token: float
    """2 x weights of all matrices in the layers."""
    per_pair: float
    """Of a query and a key: 4 x heads x head dimension x layers, for the scores and the values."""
    per_logprob: float
    """2 x embedding dimension x vocabulary."""

    @classmethod
    def of(cls, model: nn.Module) -> ModelFlops:
        """Read the sizes off a torchtune decoder, sharded or not."""
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
        """Of one sequence.

        Args:
            length: its tokens T; T (T + 1) / 2 pairs of query and key.
            num_logprobs: how many of its tokens have their logprob computed.
        """
        pairs = length * (length + 1) / 2
        return self.per_token * length + self.per_pair * pairs + self.per_logprob * num_logprobs

    def train(self, sequences: Iterable[tuple[int, int]]) -> float:
        """Forward and backward of sequences.

        Args:
            sequences: length and number of logprobs of each.
        """
        return 3.0 * sum(self.forward(*sequence) for sequence in sequences)
