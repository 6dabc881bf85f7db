"""Estimates how fast generators sample and trainers train, from arithmetic and bandwidth."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_components.settings import Settings
from grpo_tools.memory_plan.model_sizes import ModelSizes

_PEAK_FLOPS, _BYTES_PER_S = 989.4e12, 3.35e12
"""Of an H100 SXM in bf16 without sparsity, from NVIDIA's data sheet."""
_TRAINED_SHARE, _FORWARD_SHARE, _READ_SHARE = 0.35, 0.45, 0.6
"""Shares of these peaks that training, forward passes alone (of a reference: nothing to reduce over
ranks) and decoding reach: assumed, not measured by us."""
_STEP_S, _STEP_PER_SEQUENCE_S = 2.4e-3, 22e-6
"""Seconds of one core that an engine step takes, beside the GPU's work: scheduler, launches and
outputs. Measured on an H100's machine: see docs/results/gpu.md."""
_SAMPLE_S = 0.3e-3
"""Seconds of Python of each response, under the same interpreter lock: environment and rewards."""
_MEAN_LENGTH = 0.4
"""Mean length of a response, as a share of the longest; assumed."""


def rate_lines(
    cfg: Settings, sizes: ModelSizes, prompt_tokens: int, cache: int, needs_reference: bool
) -> Iterator[str]:
    """Yield lines of text about the rates of all processes on H100 GPUs, and who would wait.

    A decoding step reads all weights once and each sequence's KV cache, while one core prepares the
    next: the slower of the two is the rate. Training takes 3 times the operations of a forward
    pass, and 4 times with activation checkpointing.
    """
    options, workers = cfg.generator, cfg.generator.tensor_parallel_size
    response = max(options.max_response_tokens * _MEAN_LENGTH, 1.0)
    per_token = sizes.kv_bytes_per_token(cfg.dtype, workers)
    length = prompt_tokens + response / 2  # half of a response is there, on average
    room = int(cache / (per_token * length))
    sequences = min(options.max_num_seqs, cfg.rollouts_in_flight * cfg.group_size, room)
    read = sizes.weight_bytes(cfg.dtype) / workers + sequences * length * per_token
    python_s = _STEP_S + sequences * (_STEP_PER_SEQUENCE_S + _SAMPLE_S / response)
    step_s = max(python_s, read / (_BYTES_PER_S * _READ_SHARE))  # scheduling is asynchronous
    forward = sizes.flops.layers(int(response), prompt_tokens)
    forward += sizes.flops.layers(prompt_tokens) / cfg.group_size
    forward += sizes.flops.per_logprob * response
    passes = cfg.ppo_epochs * (4 if cfg.enable_activation_checkpointing else 3)
    per_gpu = _PEAK_FLOPS * response / forward
    rates = {
        "generators": cfg.num_generators * sequences / step_s,
        "trainers": cfg.num_trainers * _TRAINED_SHARE * per_gpu / passes,
    }
    if needs_reference:
        rates["references"] = cfg.num_references * _FORWARD_SHARE * per_gpu
    shown = ", ".join(f"{role} {rate:,.0f}" for role, rate in rates.items())
    yield f"estimate for H100 in tokens of responses per second (not measured): {shown}"
    bound = ": Python bounds their rate" if python_s == step_s else ""
    yield f"a generator's Python takes {python_s / step_s:.0%} of one core{bound}"
    if cfg.max_staleness == 0:
        yield "synchronous: they wait for each other in turn"
        return
    slowest = min(rates.values())
    waits = (f"{role} {1 - slowest / rate:.0%}" for role, rate in rates.items() if rate > slowest)
    yield f"so of their time would wait: {', '.join(waits)}"
