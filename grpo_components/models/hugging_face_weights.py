"""Reads a transformers model's files, and gives its weights the names of files again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from grpo_components.exchange.weights import StateDict
from grpo_components.models import hugging_face_attention as shared
from grpo_components.models.hugging_face_policy import prepared

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def load_hugging_face(path: Path, dtype: torch.dtype | None = None) -> nn.Module:
    """Load a model and its weights on the CPU, as transformers does."""
    from transformers import AutoModelForCausalLM

    shared.register()
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        str(path),
        dtype=dtype or _dtype_of(path),
        attn_implementation=shared.NAME,
        local_files_only=True,
        trust_remote_code=False,
        output_loading_info=True,
    )
    model, found = loaded
    for what, names in found.items():
        if names:
            raise ValueError(f"model: {path} has {what.replace('_', ' ')}: {sorted(names)[0]}")
    return prepared(model)


def read_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return all weights of a model's files, and its buffers, by the names of the built model.

    The buffers (such as tables of rotary frequencies) are in no file, and a model that is built on
    the meta device has none either.
    """
    model = load_hugging_face(path)
    buffers = dict(model.named_buffers())
    return {name: t for name, t in model.state_dict().items() if name not in buffers}, buffers


def to_file_names(model: nn.Module) -> Callable[[StateDict], StateDict]:
    """Return the function that names weights as in the files that transformers and vLLM load.

    Most models have these names already. Fused weights, such as the experts of one layer, become
    one tensor per expert again.
    """
    from transformers.core_model_loading import revert_weight_conversion

    def rename(weights: StateDict) -> StateDict:
        named = revert_weight_conversion(cast(Any, model), weights)
        return {name: _alone(tensor) for name, tensor in named.items()}

    return rename


def _alone(tensor: Tensor) -> Tensor:
    """Return a copy of a part of a larger tensor, which files cannot store; else the tensor."""
    is_part = tensor.untyped_storage().nbytes() > tensor.nbytes or not tensor.is_contiguous()
    return tensor.clone(memory_format=torch.contiguous_format) if is_part else tensor


def _dtype_of(path: Path) -> torch.dtype:
    """Return the floating-point dtype of a model's files; float32 if there are several."""
    kinds: set[str] = set()
    for file in path.glob("*.safetensors"):
        with file.open("rb") as opened:
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        kinds |= {entry["dtype"] for name, entry in header.items() if name != "__metadata__"}
    kinds &= _DTYPES.keys()
    return _DTYPES[kinds.pop()] if len(kinds) == 1 else torch.float32
