"""Builds small random models of the families that are proven as policies of transformers."""

from __future__ import annotations

from functools import partial
from typing import Any

from transformers import AutoConfig

_WINDOW = 8
"""Tokens that layers with a sliding window see: fewer than the ladder's longer prompts have."""
_SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 128,
    "intermediate_size": 192,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_WINDOWS = {
    "sliding_window": _WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
}
_GEMMA = {
    "head_dim": 32,
    "query_pre_attn_scalar": 64,
    "tie_word_embeddings": True,
    **_WINDOWS,
}


def _family(model_type: str, **options: Any) -> partial[Any]:
    return partial(AutoConfig.for_model, model_type, **_SIZES | options)


HF_FAMILIES = {
    "Qwen3": _family("qwen3", head_dim=64, tie_word_embeddings=True),
    "Qwen3-MoE": _family(
        "qwen3_moe",
        head_dim=64,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,  # not a multiple of 32: vLLM pads it on a CPU
        norm_topk_prob=True,
    ),
    "Llama 3": _family("llama", rope_parameters=_LLAMA3_ROPE),
    "Mistral": _family("mistral", head_dim=32, sliding_window=_WINDOW),
    "Mixtral": _family("mixtral", num_local_experts=4, num_experts_per_tok=2),
    "Gemma 2": _family("gemma2", **_GEMMA),
    "Gemma 3": _family("gemma3_text", **_GEMMA),
    "Phi-4": _family("phi3"),
    "OLMo 2": _family("olmo2"),
    "OLMo 3": _family("olmo3", **_WINDOWS),
    "gpt-oss": _family(
        "gpt_oss",
        head_dim=32,
        intermediate_size=64,
        num_local_experts=4,
        num_experts_per_tok=2,
        **_WINDOWS,
    ),
    "GLM-4": _family("glm4", head_dim=32),
    "GLM-4.5": _family(
        "glm4_moe",
        head_dim=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        n_shared_experts=1,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
    ),
    "Granite": _family(
        "granite",
        embedding_multiplier=12.0,
        logits_scaling=4.0,
        residual_multiplier=0.22,
        attention_multiplier=0.1,
    ),
    "SmolLM3": _family("smollm3", no_rope_layers=[1, 0]),
}
"""Function that makes the config of each family's small model, by the family's name."""
