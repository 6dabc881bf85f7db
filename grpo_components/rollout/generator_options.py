"""The options of a generator beside its section of the config: its engine and environment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from grpo_components.settings import LoraSettings

EnvironmentKind = Literal["single_turn", "multi_turn", "agents", "torchrl"]
"""The shipped one of one turn, which is not built; with a world; with agents; a user's own."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What an engine needs beside `generator`; undescribed fields are keys of the config."""

    model_path: str
    """Folder of the Hugging Face checkpoint to load as version 0."""
    device: str
    dtype: str
    recompute_kv_after_pull: bool
    num_ids: int | None = None
    """Ids that the tokenizer knows, which alone are sampled; None: all of the vocabulary."""
    colocate: bool = False
    weight_transfer: str | None = None
    """vLLM's engine through which weights arrive, nccl; None: they are in memory."""
    lora: LoraSettings | None = None
    adapter_path: str | None = None
    """Folder of the adapter to start with; None: the base model alone."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentOptions:
    """Options of the environment in which the policy answers prompts."""

    build_environment: Callable[..., Any]
    """Builds it; a torchrl one gets num_slots, decode, encode, score and max_response_tokens."""
    timeout_s: float
    """Seconds for all environment calls of one rollout together, rewards included."""
    kind: EnvironmentKind = "torchrl"
