"""The options of a generator: its engine, sampling, environment, rewards and replay."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from grpo_components.models.lora import LoraOptions
from grpo_components.rewards.pool import RewardPool, RewardSpec

if TYPE_CHECKING:
    from torchrl.envs import EnvBase


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of a vLLM engine: model, limits and weight swaps."""

    model_path: str
    """Folder of the Hugging Face checkpoint to load as version 0."""
    device: str
    """Device of the engine: cpu or cuda."""
    dtype: str
    """Compute dtype, fp32 or bf16."""
    max_model_len: int
    """Longest prompt plus response, in tokens."""
    max_num_seqs: int
    """Requests that one engine step may batch."""
    gpu_memory_utilization: float
    """Share of the GPU's memory that must be free for vLLM, and that it takes unless `kv_cache_gib`
    says how much; not used on a CPU."""
    kv_cache_gib: float | None
    """Memory for the KV cache (keys and values), in GiB; None, on a GPU only: what
    `gpu_memory_utilization` leaves. Tensor-parallel workers share it."""
    enforce_eager: bool
    """Whether to run without CUDA graphs."""
    recompute_kv_after_pull: bool
    """Whether running requests recompute their KV after a weight swap.

    Otherwise they keep the KV of the old weights. Requests that have computed nothing yet never
    read old KV.
    """
    num_ids: int | None = None
    """Ids that the tokenizer knows, which alone are sampled; None: all of the vocabulary."""
    tensor_parallel_size: int = 1
    """Processes that share each layer of the model, each with a GPU of its own on CUDA; 1: this."""
    takes_turns: bool = False
    """Whether the engine sleeps while a trainer uses its GPU."""
    weight_transfer: str | None = None
    """vLLM's engine through which weights arrive, nccl; None: they are in memory."""
    lora: LoraOptions | None = None
    """Adapter that new weights are; None: they are whole models."""
    adapter_path: str | None = None
    """Folder of the adapter to start with; None: the base model alone."""


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Options of sampling, without the temperature, which comes with each call."""

    group_size: int
    """Responses per prompt."""
    seed: int
    """Seed of the run, from which the seed of each sample is derived."""
    max_response_tokens: int
    """Longest response, tokens of the environment included."""
    stop_token_ids: Sequence[int]
    """Token ids after which sampling stops."""
    truncation: Mapping[str, float]
    """Changes to the sampled distribution other than temperature, by vLLM's names (top_p, ...).

    The trainer's log-probabilities ignore them.
    """


@dataclass(frozen=True, kw_only=True)
class EnvironmentOptions:
    """Options of the environment in which the policy answers prompts."""

    build_environment: Callable[..., EnvBase]
    """Function that builds one; takes num_slots, decode, encode, score and max_response_tokens."""
    timeout_s: float
    """Seconds for all environment calls of one rollout together, rewards included."""
    slots_apart: bool = False
    """Whether each response gets its own environment and thread, instead of one per group."""
    runs_agents: bool = False
    """Whether it is an `AgentEnvironment`, which takes no arguments when it is built."""


@dataclass(frozen=True, kw_only=True)
class RewardOptions:
    """Options of the rewards and of the processes that compute them."""

    rewards: dict[str, RewardSpec]
    """Spec of each reward, by its name in the config."""
    num_workers: int
    """Number of processes that score samples."""
    timeout_s: float
    """Seconds for all rewards of one sample."""


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """Options of recording and replaying the schedule: which command enters before which step."""

    schedule_folder: str | None = None
    """Folder in which the engine's schedule is recorded; None disables recording."""
    replayed_folder: str | None = None
    """Folder of the recorded schedule to replay; None in a live run."""
    timeout_s: float = 0.0
    """Longest wait for the next recorded command in a replay, in seconds."""


def open_reward_pool(rewards: RewardOptions) -> RewardPool:
    """Start a generator's reward processes."""
    return RewardPool(rewards.rewards, num_workers=rewards.num_workers, timeout_s=rewards.timeout_s)
