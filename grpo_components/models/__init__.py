"""Models that can be the policy: torchtune's decoders and transformers' language models."""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """Import the builder `hugging_face` only at its first use: its module is not always needed."""
    if name == "hugging_face":
        return import_module("grpo_components.models.hugging_face_policy").hugging_face
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
