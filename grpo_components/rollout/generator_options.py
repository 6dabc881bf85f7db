"""Options of a generator that come from outside the config's section `generator`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from grpo_components.settings import LoraSettings

EnvironmentKind = Literal["single_turn", "multi_turn", "agents", "torchrl"]
"""How responses are made: in one turn, without building the environment; in turns with a `World`
function (see multi_turn.py); by agents; or in a torchrl environment of the user."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Engine options from outside section `generator`; fields without a text are config keys."""

    model_path: str
    """Folder of the Hugging Face checkpoint to load as version 0."""
    device: str
    dtype: str
    recompute_kv_after_pull: bool
    num_ids: int | None = None
    """Number of token ids that the tokenizer knows; only these are sampled. None: all ids."""
    colocate: bool = False
    weight_transfer: str | None = None
    """vLLM's backend for weight transfer, `nccl`; None: weights arrive in memory."""
    lora: LoraSettings | None = None
    adapter_path: str | None = None
    """Folder of the LoRA adapter to start with; None: the base model alone."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentOptions:
    """Options of the environment in which the policy answers prompts."""

    build_environment: Callable[..., Any]
    """Function that builds an environment. For kind `torchrl`, it gets num_slots, decode, encode,
    score and max_response_tokens."""
    timeout_s: float
    """Seconds for all environment calls of one rollout together, rewards included."""
    kind: EnvironmentKind = "torchrl"
