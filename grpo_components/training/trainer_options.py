"""The option records that a trainer rank is built from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from grpo_components.exchange.staleness import StalenessContract
from grpo_components.models.meshes import Sharding
from grpo_components.objective.composition import Loss
from grpo_components.objective.penalties import Penalties
from grpo_components.objective.token_advantages import TokenAdvantages
from grpo_components.schedules import Schedule
from grpo_components.settings import LoraSettings
from grpo_components.training.supervised import SupervisedExamples


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    """How the ranks share the model."""

    num_ranks: int
    """Size of the process group."""
    sharding: Sharding
    """Layout of the ranks, and where shards and activations are kept."""
    collective_timeout_s: float
    """Longest wait of a collective operation, in seconds; one that waits longer raises."""
    takes_turns: bool = False
    """Between two steps, keep the optimizer's state in CPU memory: generators use the GPUs then."""
    open_sender: Callable[..., Any] | None = None
    """Opens the sender of weights on rank 0, given its address as `host`; None: nobody sends."""


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The policy, and how its forward pass is computed."""

    build_model: Callable[[], nn.Module]
    """Builds the torchtune decoder or transformers model."""
    build_checkpointer: Callable[[], Any] | None
    """Builds the torchtune checkpointer of the base model; None for transformers models."""
    base_model_path: str
    """Folder of the base model."""
    model_type: str | None
    """torchtune's name of the model family, for the conversion to Hugging Face names; None for
    transformers models."""
    dtype: str
    """Compute dtype, fp32 or bf16; master weights are fp32."""
    enable_activation_checkpointing: bool
    """Recompute each layer in the backward pass, to save memory."""
    compile_model: bool
    """Compile layers, softmax and loss with torch.compile."""
    logprob_chunk_tokens: int
    """Positions projected to the vocabulary at a time."""
    num_ids: int | None = None
    """Ids that the tokenizer knows, which alone are sampled; None: all of the vocabulary."""
    lora: LoraSettings | None = None
    """Adapters, which alone are trained; None trains all weights."""


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """Which tokens of a batch are trained, and in how many updates and micro-batches."""

    ppo_epochs: int
    """Number of passes over each batch."""
    updates_per_batch: int
    """Number of optimizer updates in one pass."""
    tokens_per_micro_batch: int
    """Tokens in one forward pass, each prompt counted once."""
    contract: StalenessContract
    """Staleness contract; tokens older than it allows are not trained."""
    mask_overlong: bool
    """Do not train responses that were cut off at the length limit."""


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """The optimizer, its learning rate and the clipping of the gradient."""

    build_optimizer: Callable[[Any], Optimizer]
    """Builds the optimizer from the parameters."""
    build_lr_scheduler: Callable[[Optimizer], LRScheduler] | None
    """Builds the learning-rate scheduler from the optimizer; None uses no scheduler."""
    learning_rate: Schedule | None
    """Learning rate by training step; None leaves it to the optimizer and the scheduler."""
    clip_grad_norm: float | None
    """Largest allowed norm of the gradient; None disables clipping."""


@dataclass(frozen=True, kw_only=True)
class ObjectiveOptions:
    """What is optimized: the loss, and how tokens are weighted in it."""

    loss: Loss
    """Policy loss of each token."""
    penalties: Penalties
    """KL to the reference and entropy bonus, which are added to the loss."""
    aggregation: Callable[[NDArray[np.int64]], NDArray[np.float64]]
    """Function of each response's number of trained tokens [S]; returns the weight in the loss that
    each token of the response gets [S]."""
    off_policy: Callable[..., Tensor]
    """Function of the log ratios [N] of trainer to generator, and of each token's response [N];
    returns the off-policy weights [N]."""
    token_advantages: TokenAdvantages | None = None
    """Computes the tokens' advantages; None gives each token the advantage of its response."""
    teacher_coeff: float = 0.0
    """Weight of the teacher's term in the advantages; 0 without a teacher."""
    needs_reference: bool = False
    """Whether a KL to the reference is part of the objective."""
    ptx: SupervisedExamples | None = None
    """Examples of a supervised loss that is added to the policy's; None disables that loss."""


@dataclass(frozen=True, kw_only=True)
class DiagnosticsOptions:
    """What a rank measures and writes during training."""

    log_peak_memory_stats: bool
    """Report this process's peak memory so far, in GiB."""
    build_profiler: Callable[[], tuple[Any, Any]] | None
    """Builds torchtune's profiler and its settings; None disables profiling."""
    logged_responses: int = 0
    """Number of each batch's first responses for which a step returns token logprobs."""
