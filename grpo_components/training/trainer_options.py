"""The options that a trainer rank is built from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from grpo_components.exchange.staleness import StalenessContract
from grpo_components.models.meshes import Sharding
from grpo_components.schedules import Schedule
from grpo_components.settings import LoraSettings


@dataclass(frozen=True, kw_only=True)
class TrainerOptions:
    """Options of a trainer rank, except the objective; most undescribed fields are config keys."""

    num_ranks: int
    sharding: Sharding
    collective_timeout_s: float
    """Seconds that a collective may take (`timeouts.collective_s`)."""
    colocate: bool = False
    open_sender: Callable[..., Any] | None = None
    """Builds rank 0's weight sender from the node's address `host`; None: no sender."""
    build_model: Callable[[], nn.Module]
    """Builds the torchtune decoder or transformers model."""
    build_checkpointer: Callable[[], Any] | None
    """Builds the torchtune checkpointer of the base model; None for transformers models."""
    base_model_path: str
    model_type: str | None
    """torchtune's name of the model family, for the conversion to Hugging Face names; None for
    transformers models."""
    dtype: str
    enable_activation_checkpointing: bool = False
    compile: bool = False
    logprob_chunk_tokens: int
    num_ids: int | None = None
    """Number of ids that the tokenizer knows; only they are sampled. None: whole vocabulary."""
    lora: LoraSettings | None = None
    ppo_epochs: int = 1
    updates_per_batch: int = 1
    tokens_per_micro_batch: int
    contract: StalenessContract
    mask_overlong: bool = False
    build_optimizer: Callable[[Any], Optimizer]
    """Builds the optimizer from the parameters."""
    build_lr_scheduler: Callable[[Optimizer], LRScheduler] | None = None
    """Builds the learning-rate scheduler from the optimizer; None uses no scheduler."""
    learning_rate: Schedule | None = None
    """Learning rate by training step; None leaves it to the optimizer and the scheduler."""
    clip_grad_norm: float | None = None
    log_peak_memory_stats: bool = False
    build_profiler: Callable[[], tuple[Any, Any]] | None = None
    """Builds torchtune's profiler and its settings; None disables profiling."""
    logged_responses: int = 0
    """The token logprobs of this many responses, the first of each batch, go to the rollout log."""
