"""Checks that vLLM can run the base model, and split it over the workers of a generator."""

from __future__ import annotations

from typing import Any

from grpo_components.errors import fail

_VOCAB_PADDING = 64
"""vLLM pads the vocabulary to a multiple of this, and splits what results."""
_CPU_TILE = 32
"""Widths of experts must be multiples of this for vLLM's kernels on a CPU."""
_WRONG_ON_CPU = {"cohere2": "whose logprobs in vLLM are 7.0e-4 nats from transformers' on a CPU"}
"""Families that vLLM computes less exactly than the equivalence ladder allows -> how far off."""


def check_tensor_parallel(workers: int, hf_config: dict[str, Any]) -> None:
    """Check that a number of workers can share each layer of a checkpoint in vLLM."""
    if not (problem := _unsplit(workers, hf_config)):
        return
    heads = hf_config.get("num_attention_heads") or workers
    possible = [n for n in range(1, heads + 1) if not _unsplit(n, hf_config)]
    allowed = ", ".join(map(str, possible)) or "1"
    fail("generator.tensor_parallel_size", f"{workers} given, {problem}", allowed)


def check_cpu_engine(hf_config: dict[str, Any]) -> None:
    """Check that vLLM computes a checkpoint on a CPU, and as transformers does."""
    family = hf_config.get("model_type")
    if (found := _WRONG_ON_CPU.get(str(family))) is not None:
        fail("base_model_path", f"a model of {family} given, {found}", "see docs/models.md")
    counts = ("num_experts", "num_local_experts", "n_routed_experts")
    if not any(hf_config.get(name) for name in counts):
        return
    # Other families' intermediate sizes are padded.
    names = ["hidden_size", *["intermediate_size"] * (family == "gpt_oss")]
    for name in names:
        if (size := hf_config.get(name) or 0) % _CPU_TILE:
            problem = f"a mixture of experts with {name}: {size} given, and vLLM's CPU kernels "
            allowed = f"on a CPU a multiple of {_CPU_TILE}"
            fail("base_model_path", f"{problem}cannot compute it", allowed)


def _unsplit(workers: int, hf_config: dict[str, Any]) -> str:
    """Return which size of a model the workers cannot share; empty if they can share all."""
    heads = hf_config.get("num_attention_heads")
    kv_heads = hf_config.get("num_key_value_heads") or heads
    vocab = hf_config.get("vocab_size")
    sizes = {
        "num_attention_heads": heads,
        "intermediate_size": hf_config.get("intermediate_size"),
        "padded vocab_size": vocab and -(-vocab // _VOCAB_PADDING) * _VOCAB_PADDING,
    }
    for name, size in sizes.items():
        if (size or 0) % workers:
            return f"which does not divide the model's {name}: {size}"
    if kv_heads and kv_heads % workers and workers % kv_heads:  # fewer heads are replicated
        return f"and the model's num_key_value_heads: {kv_heads} is no divisor or multiple of it"
    return ""
