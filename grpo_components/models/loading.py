"""Loads models whole, not sharded over ranks, and reads the weights of transformers models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torchtune import training

from grpo_components.models import hugging_face_attention as shared
from grpo_components.models.hugging_face_policy import folder_of, prepared

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_FILE_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def load_whole_model(
    build_model: Callable[[], nn.Module],
    build_checkpointer: Callable[[], Any] | None,
    device: torch.device,
    dtype: str,
) -> nn.Module:
    """Load a whole frozen model, such as the reference, on one device in `dtype`."""
    with torch.device("meta"):
        path = folder_of(build_model())
    if path is not None:
        model = load_hugging_face(path, DTYPES[dtype]).to(device)
        return model.requires_grad_(False)
    with training.set_default_dtype(DTYPES[dtype]), device:
        model = build_model()
    assert build_checkpointer is not None, "preflight asks for a torchtune decoder's checkpointer"
    state_dict = build_checkpointer().load_checkpoint()[training.MODEL_KEY]
    model.load_state_dict(state_dict, strict=True)
    return model.requires_grad_(False).eval()


def load_hugging_face(path: Path, dtype: torch.dtype | None = None) -> nn.Module:
    """Load a transformers model on the CPU; refuse files with missing or unexpected weights."""
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
    """Load a transformers model; return its weights and its buffers, each by name in the model.

    Buffers, such as tables of rotary frequencies, are in no file, and a model on the meta device
    has no values for them. So they are taken from a loaded model.
    """
    model = load_hugging_face(path)
    buffers = dict(model.named_buffers())
    return {name: t for name, t in model.state_dict().items() if name not in buffers}, buffers


def _dtype_of(path: Path) -> torch.dtype:
    """Return the floating-point dtype of the tensors in a model's files; float32 if they differ."""
    kinds: set[str] = set()
    for file in path.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            kinds |= {opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118
    kinds &= _FILE_DTYPES.keys()
    return _FILE_DTYPES[kinds.pop()] if len(kinds) == 1 else torch.float32
