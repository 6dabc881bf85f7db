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
    """What a trainer rank needs beside the objective; most fields are keys of the config."""

    num_ranks: int
    """Size of the process group."""
    sharding: Sharding
    """Layout of the ranks, and where shards and activations are kept."""
    collective_timeout_s: float
    """Longest wait of a collective operation, in seconds; one that waits longer raises."""
    colocate: bool = False
    """Between two steps, keep the optimizer's state in CPU memory: generators use the GPUs then."""
    open_sender: Callable[..., Any] | None = None
    """Opens the sender of weights on rank 0, given its address as `host`; None: nobody sends."""
    build_model: Callable[[], nn.Module]
    """Builds the torchtune decoder or transformers model."""
    build_checkpointer: Callable[[], Any] | None
    """Builds the torchtune checkpointer of the base model; None for transformers models."""
    base_model_path: str
    model_type: str | None
    """torchtune's name of the model family, for the conversion to Hugging Face names; None for
    transformers models."""
    dtype: str
    """Compute dtype, fp32 or bf16; master weights are fp32."""
    enable_activation_checkpointing: bool = False
    compile: bool = False
    """Compile layers, softmax and loss with torch.compile."""
    logprob_chunk_tokens: int
    """Positions projected to the vocabulary at a time."""
    num_ids: int | None = None
    """Ids that the tokenizer knows, which alone are sampled; None: all of the vocabulary."""
    lora: LoraSettings | None = None
    """Adapters, which alone are trained; None trains all weights."""
    ppo_epochs: int = 1
    """Number of passes over each batch."""
    updates_per_batch: int = 1
    """Number of optimizer updates in one pass."""
    tokens_per_micro_batch: int
    """Tokens in one forward pass, each prompt counted once."""
    contract: StalenessContract
    """Staleness contract; tokens older than it allows are not trained."""
    mask_overlong: bool = False
    """Do not train responses that were cut off at the length limit."""
    build_optimizer: Callable[[Any], Optimizer]
    """Builds the optimizer from the parameters."""
    build_lr_scheduler: Callable[[Optimizer], LRScheduler] | None = None
    """Builds the learning-rate scheduler from the optimizer; None uses no scheduler."""
    learning_rate: Schedule | None = None
    """Learning rate by training step; None leaves it to the optimizer and the scheduler."""
    clip_grad_norm: float | None = None
    """Largest allowed norm of the gradient; None disables clipping."""
    log_peak_memory_stats: bool = False
    """Report this process's peak memory so far, in GiB."""
    build_profiler: Callable[[], tuple[Any, Any]] | None = None
    """Builds torchtune's profiler and its settings; None disables profiling."""
    logged_responses: int = 0
    """Number of each batch's first responses for which a step returns token logprobs."""
