"""Counts floating-point operations (FLOPs) of training; measures utilization and peak memory."""

from __future__ import annotations

import re
import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from grpo_components.models.hugging_face_policy import decoder_layers, is_transformers
from grpo_components.models.micro_batches import micro_batch_cost
from grpo_components.models.shared_prompts import Part

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
"""(pattern of the GPU's name, peak TFLOP/s in bf16, peak TFLOP/s in float32), from NVIDIA's data
sheets: bf16 on tensor cores with float32 accumulation and no sparsity, float32 without TF32."""


def peak_flops(gpu_name: str, dtype: str) -> float | None:
    """Return a GPU's peak FLOPs per second in `dtype`, bf16 or fp32; None for an unknown GPU."""
    for pattern, bf16, fp32 in _PEAK_TFLOPS:
        if re.search(pattern, gpu_name):
            return {"bf16": bf16, "fp32": fp32}[dtype] * 1e12
    return None


@dataclass(frozen=True)
class ModelFlops:
    """Counts the FLOPs of training a model; a multiply-add is two FLOPs.

    Only matrix products count, as in the appendix of PaLM (arXiv 2204.02311). A prompt counts once
    for all its responses, a query counts with its own and earlier keys only, and the projection to
    the vocabulary counts only for tokens whose logprobs are wanted. The backward pass takes twice
    the FLOPs of the forward pass; for frozen weights, which get no gradient, it takes as many as
    the forward pass. Not counted: recomputation (activation checkpointing, chunks of logprobs,
    prompts whose responses are in several micro-batches), padding, norms, softmax, optimizer.
    """

    per_token: float
    """FLOPs per token in the layers: 2 x number of weights in all their matrices."""
    per_pair: float
    """FLOPs per query-key pair (scores and values): 4 x heads x head dimension x layers."""
    per_logprob: float
    """FLOPs per logprob: 2 x embedding dimension x vocabulary size."""
    frozen_per_token: float = 0.0
    """The part of `per_token` in frozen weights, whose gradients are not computed."""
    head_is_frozen: bool = False

    @classmethod
    def of(cls, model: nn.Module) -> ModelFlops:
        """Count the FLOPs of a policy from the shapes of its weights, which may be sharded.

        If a layer has experts, only as many of them count as one token uses.
        """
        layers, policy = decoder_layers(model), cast(Any, model)
        config = policy.config.get_text_config() if is_transformers(model) else None
        weights = frozen = 0.0
        for parameter in layers.parameters():
            if parameter.ndim == 2:
                weights += parameter.numel()
                frozen += 0 if parameter.requires_grad else parameter.numel()
            elif parameter.ndim == 3:  # fused experts
                used = getattr(config, "num_experts_per_tok", None) or parameter.shape[0]
                weights += parameter.numel() * used / parameter.shape[0]
        if config is None:
            widths = sum(layer.attn.num_heads * layer.attn.head_dim for layer in policy.layers)
            embedding = policy.tok_embeddings.weight
        else:
            heads = config.num_attention_heads
            head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
            widths = heads * head_dim * len(layers)
            embedding = policy.get_input_embeddings().weight
        vocabulary, dim = embedding.shape
        return cls(
            per_token=2.0 * weights,
            per_pair=4.0 * widths,
            per_logprob=2.0 * vocabulary * dim,
            frozen_per_token=2.0 * frozen,
            head_is_frozen=not embedding.requires_grad,
        )

    def layers(self, tokens: int, earlier: int = 0) -> float:
        """Return the layers' FLOPs in a forward pass over `tokens` tokens after `earlier` ones."""
        pairs = tokens * (tokens + 1) / 2 + tokens * earlier
        return self.per_token * tokens + self.per_pair * pairs

    def train(self, parts: Sequence[Part], num_logprobs: int) -> float:
        """Return the FLOPs of one forward and backward pass over prompts and responses.

        `parts` has their sizes; `num_logprobs` is the number of tokens whose logprobs are wanted.
        """
        everything = micro_batch_cost(parts, range(len(parts)), self.layers)
        tokens = micro_batch_cost(parts, range(len(parts)), lambda new, _: new)
        not_done = self.frozen_per_token * tokens
        not_done += self.per_logprob * num_logprobs if self.head_is_frozen else 0.0
        return 3.0 * (everything + self.per_logprob * num_logprobs) - not_done


class ResourceUse:
    """Computes the FLOPs utilization (all ranks) and peak memory (this rank) of training steps."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        dtype: str,
        num_ranks: int,
        log_peak_memory_stats: bool,
    ) -> None:
        self.flops = ModelFlops.of(model)
        self._device, self._log_memory = device, log_peak_memory_stats
        peak = None
        if device.type == "cuda":
            peak = peak_flops(torch.cuda.get_device_name(device), dtype)
        self._peak_flops = peak and peak * num_ranks

    def metrics(
        self,
        parts: Sequence[Part],
        num_logprobs: int,
        passes: int,
        start_known: bool,
        seconds: float,
    ) -> dict[str, float]:
        """Return the metrics of a step that trained `passes` times on responses of sizes `parts`.

        `start_known`: an extra forward pass computed the logprobs at the start of the step.
        """
        metrics: dict[str, float] = {}
        if self._peak_flops:
            done = self.flops.train(parts, num_logprobs) * (passes + (1 / 3 if start_known else 0))
            metrics["throughput/mfu"] = done / (seconds * self._peak_flops)
        if self._log_memory:
            metrics["memory/trainer_peak_gib"] = peak_memory_gib(self._device)
        return metrics


def peak_memory_gib(device: torch.device) -> float:
    """Return this process's peak memory in GiB: on a GPU its tensors, on a CPU everything."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)  # macOS counts bytes, Linux KiB
