"""Builds small random models of every supported family, of torchtune and of transformers."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torchtune.models.gemma import gemma
from torchtune.models.llama2 import llama2
from torchtune.models.llama3 import llama3
from torchtune.models.llama3_1 import llama3_1
from torchtune.models.llama3_2 import llama3_2
from torchtune.models.mistral import mistral
from torchtune.models.phi3 import phi3
from torchtune.models.qwen2 import qwen2
from transformers import AutoConfig, AutoModelForCausalLM

_SIZES = {
    **{"vocab_size": 256, "num_layers": 2, "num_heads": 4, "embed_dim": 128},
    **{"intermediate_dim": 192, "max_seq_len": 256},
}
_HF_SIZES: dict[str, Any] = {
    **{"vocab_size": 256, "num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 192},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256},
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
    "tie_word_embeddings": False,
}
_TIED: Any = {"tie_word_embeddings": True}


def _config(model_type: str, **options: Any) -> partial[Any]:
    return partial(AutoConfig.for_model, model_type, **_HF_SIZES | options)


class Family(NamedTuple):
    """A model family of torchtune with one layout of its weights."""

    model_type: str
    """torchtune's name of the family."""
    build_model: Callable[[], nn.Module]
    """Builds torchtune's small model of the family."""
    config: Callable[[], Any]
    """Makes the Hugging Face config of the same model."""


def _family(
    model_type: str,
    hf_model_type: str,
    builder: Callable[..., nn.Module],
    num_kv_heads: int = 2,
    rope_theta: float = 10_000.0,
    **hf_options: Any,
) -> Family:
    # The defaults of torchtune's builders; Hugging Face has others.
    rope = {"rope_type": "default", "rope_theta": rope_theta}
    defaults = {"rms_norm_eps": 1e-5, "rope_parameters": rope, "num_key_value_heads": num_kv_heads}
    build_model = partial(builder, **_SIZES, num_kv_heads=num_kv_heads)
    return Family(model_type, build_model, _config(hf_model_type, **defaults | hf_options))


def _scaled_rope(factor: float, original: int) -> dict[str, Any]:
    scaling = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = {"rope_type": "llama3", "rope_theta": 500_000.0}
    return {**rope, **scaling, "original_max_position_embeddings": original}


_LONG = {"max_position_embeddings": 16384}
FAMILIES = {
    "LLAMA2": _family("LLAMA2", "llama", llama2),
    "LLAMA3": _family("LLAMA3", "llama", llama3, rope_theta=500_000.0),
    "LLAMA3 (3.1)": _family(
        "LLAMA3", "llama", llama3_1, rope_parameters=_scaled_rope(8.0, 8192), **_LONG
    ),
    "LLAMA3_2": _family(
        "LLAMA3_2", "llama", llama3_2, rope_parameters=_scaled_rope(32.0, 8192), **_LONG, **_TIED
    ),
    "MISTRAL": _family("MISTRAL", "mistral", mistral),
    "GEMMA": _family(
        "GEMMA", "gemma", partial(gemma, head_dim=64), head_dim=64, rms_norm_eps=1e-6, **_TIED
    ),
    "PHI3_MINI": _family("PHI3_MINI", "phi3", phi3, num_kv_heads=4),
    "PHI4": _family("PHI4", "phi3", phi3),
    "QWEN2 (tied)": _family("QWEN2", "qwen2", partial(qwen2, **_TIED), rope_theta=1e6, **_TIED),
    "QWEN2 (untied)": _family("QWEN2", "qwen2", qwen2, rope_theta=1e6),
}
"""Every family that `hf_converter` supports, by names that also tell layouts apart."""

_WINDOW = 8
"""Tokens that layers with a sliding window see: fewer than the ladder's longer prompts have."""
_WINDOWS = {"sliding_window": _WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 64, **_TIED, **_WINDOWS}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_QWEN_MOE = {
    **{"head_dim": 64, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True},
    "moe_intermediate_size": 48,  # not a multiple of 32: vLLM pads it on a CPU
}
_GLM_MOE = {
    **{"head_dim": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    **{"moe_intermediate_size": 64, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
}
_GRANITE = {
    **{"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 4.0},
    "attention_multiplier": 0.1,
}
HF_FAMILIES = {
    "Qwen3": _config("qwen3", head_dim=64, **_TIED),
    "Qwen3-MoE": _config("qwen3_moe", **_QWEN_MOE),
    "Llama 3": _config("llama", rope_parameters=_scaled_rope(8.0, 64)),
    "Mistral": _config("mistral", head_dim=32, sliding_window=_WINDOW),
    "Mixtral": _config("mixtral", **_EXPERTS),
    "Gemma 2": _config("gemma2", **_GEMMA),
    "Gemma 3": _config("gemma3_text", **_GEMMA),
    "Phi-4": _config("phi3"),
    "OLMo 2": _config("olmo2"),
    "OLMo 3": _config("olmo3", **_WINDOWS),
    "gpt-oss": _config("gpt_oss", head_dim=32, intermediate_size=64, **_EXPERTS, **_WINDOWS),
    "GLM-4": _config("glm4", head_dim=32),
    "GLM-4.5": _config("glm4_moe", **_GLM_MOE),
    "Granite": _config("granite", **_GRANITE),
    "SmolLM3": _config("smollm3", no_rope_layers=[1, 0]),
}
"""The families that are proven as policies of transformers -> what makes a small one's config."""


def random_checkpoint(family: Family, folder: Path, seed: int) -> Path:
    return save_random(family.config(), folder, seed)


def save_random(config: Any, folder: Path, seed: int) -> Path:
    """Save a randomly initialized model with Hugging Face's `save_pretrained`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = AutoModelForCausalLM.from_config(config)
        names = {name for name, _ in model.named_parameters()} | model.state_dict().keys()
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            # A tied head would otherwise be certain that each token follows itself.
            is_tied_head = config.tie_word_embeddings and "embed_tokens" in name
            if name in names:  # also norms, biases and saved buffers, to detect swapped ones
                nn.init.normal_(tensor, std=0.05 if is_tied_head else 0.2)
    model.save_pretrained(folder)
    return folder
