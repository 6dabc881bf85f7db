"""Estimates how fast generators sample and trainers train, from arithmetic and bandwidth."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from grpo_components.models.loading import DTYPES
from grpo_components.settings import Settings
from grpo_components.sizing.model_sizes import ModelSizes

_PEAK_FLOPS, _BYTES_PER_S = 989.4e12, 3.35e12
"""Of an H100 SXM in bf16 without sparsity, from NVIDIA's data sheet."""
_TRAINED_SHARE, _READ_SHARE = 0.35, 0.6
"""Shares of these peaks that training and decoding reach: assumed, not measured by us."""
_STEP_S = 0.006
"""Seconds of an engine step beside the GPU's work: scheduler and sampler; assumed."""
_MEAN_LENGTH = 0.5
"""Mean length of a response, as a share of the longest; assumed."""


@dataclass(frozen=True)
class Rates:
    """Tokens of responses per second, of all processes together."""

    sampled: float
    trained: float

    @classmethod
    def of(cls, cfg: Settings, sizes: ModelSizes, prompt_tokens: int) -> Rates:
        """Estimate the rates on H100 GPUs.

        A decoding step reads all weights once and each sequence's KV cache. Training takes 3 times
        the operations of a forward pass, and 4 times with activation checkpointing.
        """
        response = max(cfg.generator.max_response_tokens * _MEAN_LENGTH, 1.0)
        options, workers = cfg.generator, cfg.generator.tensor_parallel_size
        sequences = min(options.max_num_seqs, cfg.rollouts_in_flight * cfg.group_size)
        weights = sizes.parameters * DTYPES[cfg.dtype].itemsize / workers
        length = prompt_tokens + response / 2  # half of a response is there, on average
        cache = sequences * length * sizes.kv_bytes_per_token(cfg.dtype, workers)
        step_s = _STEP_S + (weights + cache) / (_BYTES_PER_S * _READ_SHARE)
        sampled = cfg.num_generators * sequences / step_s
        forward = sizes.flops.layers(int(response), prompt_tokens)
        forward += sizes.flops.layers(prompt_tokens) / cfg.group_size
        forward += sizes.flops.per_logprob * response
        passes = 4 if cfg.enable_activation_checkpointing else 3
        passes *= cfg.ppo_epochs
        trained = cfg.num_trainers * _PEAK_FLOPS * _TRAINED_SHARE * response / (passes * forward)
        return cls(sampled, trained)

    def lines(self, cfg: Settings) -> Iterator[str]:
        """Yield lines of text about the split of the GPUs."""
        sampled, trained = f"{self.sampled:,.0f}", f"{self.trained:,.0f}"
        yield f"estimate for H100 (not measured): {sampled} tokens/s sampled, {trained} trained"
        if cfg.max_staleness == 0:
            yield "synchronous: generators and trainers wait for each other in turn"
        elif self.sampled > self.trained:
            yield f"the generators would wait {1 - self.trained / self.sampled:.0%} of the time"
        else:
            yield f"the trainers would wait {1 - self.sampled / self.trained:.0%} of the time"
