"""The option records that a generator is built from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from grpo_components.rewards.pool import RewardSpec

if TYPE_CHECKING:
    from torchrl.envs import EnvBase


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """A vLLM engine: its model, its limits, its weight swaps."""

    model_path: str
    """Folder of the Hugging Face checkpoint to load as version 0."""
    device: str
    """cpu or cuda."""
    dtype: str
    """Compute dtype, fp32 or bf16."""
    max_model_len: int
    """Longest prompt plus response, in tokens."""
    max_num_seqs: int
    """Requests that one engine step may batch."""
    gpu_memory_utilization: float
    """Share of the GPU's memory for vLLM; not used on a CPU."""
    enforce_eager: bool
    """Use no CUDA graphs."""
    recompute_kv_after_pull: bool
    """Running requests recompute their KV under new weights; otherwise they keep the old KV.

    Requests that have computed nothing yet never read KV of old weights.
    """


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How responses are sampled; the temperature comes with each call."""

    group_size: int
    """Responses per prompt."""
    seed: int
    """Sampling seeds derive from it."""
    max_response_tokens: int
    """Longest response, tokens of the environment included."""
    stop_token_ids: Sequence[int]
    """A response ends with the first of these."""
    truncation: Mapping[str, float]
    """Other changes to the sampled distribution, by vLLM's names (top_p, ...).

    The trainer cannot account for them.
    """


@dataclass(frozen=True, kw_only=True)
class EnvironmentOptions:
    """The environment that prompts are answered in."""

    build_environment: Callable[..., EnvBase]
    """Builds one from num_slots, decode, encode, score and max_response_tokens."""
    timeout_s: float
    """Deadline for all environment calls of one rollout, rewards included."""
    slots_apart: bool = False
    """Give each response an environment and a thread of its own, instead of one per group."""


@dataclass(frozen=True, kw_only=True)
class RewardOptions:
    """The rewards, and the processes that compute them."""

    rewards: dict[str, RewardSpec]
    """By the name in the config."""
    num_workers: int
    """Processes that score."""
    timeout_s: float
    """Deadline of one sample's rewards."""


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """Where the engine's schedule is written, and which one is replayed."""

    schedule_folder: str | None = None
    """Receives the engine's schedule; None writes none."""
    replayed_folder: str | None = None
    """Holds the schedule to repeat; None for a new run."""
    timeout_s: float = 0.0
    """Longest wait for the next recorded command."""
