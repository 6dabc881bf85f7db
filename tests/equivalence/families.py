"""Builds small random Hugging Face models of every supported model family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

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
    "vocab_size": 256,
    "num_layers": 2,
    "num_heads": 4,
    "embed_dim": 128,
    "intermediate_dim": 192,
    "max_seq_len": 256,
}


@dataclass(frozen=True)
class Family:
    """A model family with one layout of its weights."""

    model_type: str
    """torchtune's name of the family."""
    hf_model_type: str
    """Hugging Face's name of the family."""
    build_model: Callable[[], nn.Module]
    """Builds torchtune's small model of the family."""
    hf_options: dict[str, Any]
    """Settings of the Hugging Face config that are not sizes."""


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
    return Family(model_type, hf_model_type, build_model, defaults | hf_options)


def _scaled_rope(factor: float) -> dict[str, Any]:
    """Return Hugging Face's options for the RoPE scaling of torchtune's Llama 3.1 and later."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return {"rope_parameters": rope, "max_position_embeddings": 16384}


FAMILIES = {
    "LLAMA2": _family("LLAMA2", "llama", llama2),
    "LLAMA3": _family("LLAMA3", "llama", llama3, rope_theta=500_000.0),
    "LLAMA3 (3.1)": _family("LLAMA3", "llama", llama3_1, **_scaled_rope(8.0)),
    "LLAMA3_2": _family(
        "LLAMA3_2", "llama", llama3_2, tie_word_embeddings=True, **_scaled_rope(32.0)
    ),
    "MISTRAL": _family("MISTRAL", "mistral", mistral),
    "GEMMA": _family(
        "GEMMA",
        "gemma",
        partial(gemma, head_dim=64),
        tie_word_embeddings=True,
        head_dim=64,
        rms_norm_eps=1e-6,
    ),
    "PHI3_MINI": _family("PHI3_MINI", "phi3", phi3, num_kv_heads=4),
    "PHI4": _family("PHI4", "phi3", phi3),
    "QWEN2 (tied)": _family(
        "QWEN2",
        "qwen2",
        partial(qwen2, tie_word_embeddings=True),
        tie_word_embeddings=True,
        rope_theta=1e6,
    ),
    "QWEN2 (untied)": _family("QWEN2", "qwen2", qwen2, rope_theta=1e6),
}
"""Every family that `hf_converter` supports, by names that also tell layouts apart."""


def hf_config_of(family: Family) -> Any:
    """Return the Hugging Face config of a family's small model."""
    options: dict[str, Any] = {
        "vocab_size": _SIZES["vocab_size"],
        "num_hidden_layers": _SIZES["num_layers"],
        "num_attention_heads": _SIZES["num_heads"],
        "hidden_size": _SIZES["embed_dim"],
        "intermediate_size": _SIZES["intermediate_dim"],
        "max_position_embeddings": _SIZES["max_seq_len"],
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    return AutoConfig.for_model(family.hf_model_type, **options | family.hf_options)


def random_checkpoint(family: Family, folder: Path, seed: int) -> Path:
    """Save a family's randomly initialized model; see `save_random`."""
    return save_random(hf_config_of(family), folder, seed)


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
