"""Converts weights to the names and row order of Hugging Face's files, one layer at a time."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torchtune.models import convert_weights

from grpo_components.errors import fail
from grpo_components.exchange.weights import StateDict
from grpo_components.models.hugging_face_policy import is_transformers

_LAYER = re.compile(r"^(?:.*\.)?layers\.(\d+)\.")


def layer_groups(names: Iterable[str]) -> list[list[str]]:
    """Group parameter names for conversion: names of one layer together, all others one by one."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in names:
        match = _LAYER.match(name)
        groups[f"layers.{match[1]}" if match else name].append(name)
    return list(groups.values())


def file_converter(
    model: nn.Module, model_type: str | None, base_model_path: Path
) -> Callable[[StateDict], StateDict]:
    """Build the function that converts a policy's weights to the form of Hugging Face's files.

    Most transformers models already use the names of the files. Fused weights, such as the experts
    of one layer, are split again into one tensor per expert.
    """
    if not is_transformers(model):
        if model_type is None:
            problem = "null given, and `model` is a torchtune decoder"
            fail("checkpointer", problem, "its checkpointer")
        return hf_converter(model_type, base_model_path)
    from transformers.core_model_loading import revert_weight_conversion

    def rename(weights: StateDict) -> StateDict:
        named = revert_weight_conversion(cast(Any, model), weights)
        return {name: _alone(tensor) for name, tensor in named.items()}

    return rename


def _alone(tensor: Tensor) -> Tensor:
    """Make a tensor fit for a file: copy it if it is part of a larger one or not contiguous."""
    is_part = tensor.untyped_storage().nbytes() > tensor.nbytes or not tensor.is_contiguous()
    return tensor.clone(memory_format=torch.contiguous_format) if is_part else tensor


def hf_converter(model_type: str, base_model_path: Path) -> Callable[[StateDict], StateDict]:
    """Build the function that converts torchtune's weights to the form of Hugging Face's files.

    `model_type` is one of `settings.ModelType`, the families whose conversion is exact.
    """
    hf_config = json.loads((base_model_path / "config.json").read_text())
    heads = hf_config["num_attention_heads"]
    kv_heads = hf_config.get("num_key_value_heads", heads)
    sizes: Any = {"num_heads": heads, "num_kv_heads": kv_heads, "dim": hf_config["hidden_size"]}
    if model_type == "QWEN2":
        from torchtune.models.qwen2._convert_weights import qwen2_tune_to_hf

        return partial(  # pyright: ignore[reportReturnType] -- torchtune says dict without types
            qwen2_tune_to_hf, **sizes, tie_word_embeddings=bool(hf_config["tie_word_embeddings"])
        )
    if model_type in ("PHI3_MINI", "PHI4"):
        from torchtune.models.phi3._convert_weights import phi3_tune_to_hf

        return phi3_tune_to_hf
    # These store the rows of queries and keys in another order than Hugging Face.
    assert model_type in ("LLAMA2", "LLAMA3", "LLAMA3_2", "MISTRAL", "GEMMA"), model_type
    return partial(convert_weights.tune_to_hf, **sizes, head_dim=hf_config.get("head_dim"))
