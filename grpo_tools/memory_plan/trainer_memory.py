"""Predicts the memory of trainer ranks and of frozen models, by passes on fake tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torchtune import config

from grpo_components.errors import fail
from grpo_components.models.flops import ModelFlops
from grpo_components.models.hugging_face_policy import hugging_face
from grpo_components.models.loading import DTYPES
from grpo_components.models.logprobs import parts_of
from grpo_components.models.lora import adapted_model
from grpo_components.models.micro_batches import plan_micro_batches
from grpo_components.models.shared_prompts import arrange
from grpo_components.settings import Settings
from grpo_components.trajectory import TokenSequence
from grpo_tools.memory_plan.generator_memory import transfer_bytes
from grpo_tools.memory_plan.model_sizes import ModelSizes
from grpo_tools.memory_plan.passes import Bytes, inference_bytes, training_bytes
from grpo_tools.memory_plan.role_memory import (
    FRAGMENTATION,
    GPU_PROCESS_BYTES,
    Device,
    RoleMemory,
    gib,
)

_STATIC = ("weights", "gradients", "optimizer")
_OFFLOADED_LAYERS = 6
"""Layers whose activations are still on the GPU when torchtune offloads them: five are being copied
to the CPU, one is being copied back."""
_PUSHED_LAYERS = 3
"""Copies of a layer (or another tensor) on a trainer's GPU during a push: the cast shard, the
gathered tensor, the renamed tensor."""
_PINNED = 2
"""Largest ratio of page-locked memory to a tensor's bytes: PyTorch rounds up to 2**n."""
_BYTES_PER_TOKEN = 256
"""Bytes of losses, metrics and their inputs, per token of a micro-batch: 32 x 64 bits."""
_KERNELS = 1.005
"""Factor on the peak of a pass, for kernel workspaces and other memory that fake tensors do not
show; 1.001 was measured."""


def _policy(cfg: Settings) -> Callable[[], nn.Module]:
    """Return a function that builds the policy, with its adapters."""
    build_model = partial(config.instantiate, cfg.model)
    if cfg.lora is None:
        return build_model
    return partial(adapted_model, build_model, cfg.lora, cfg.dtype)


_META = torch.device("meta")  # masks of long sequences would take gigabytes
_MAX_RANKS, _MAX_ROUNDS = 4, 3
"""Maximum numbers of ranks, and of micro-batches per rank, for which batches are planned. With more
of them, the batches would have the same sizes."""


@dataclass(frozen=True)
class MicroBatch:
    """The sequences of one forward pass."""

    sequences: list[TokenSequence]
    is_only: bool
    """Whether no rank has another micro-batch in the same update."""

    @property
    def tokens(self) -> int:
        """Tokens of the forward pass, each prompt counted once."""
        return len(arrange(parts_of(self.sequences), _META).layout.positions)


def longest_micro_batches(
    cfg: Settings, prompt: int, groups: int, ranks: int, flops: ModelFlops, wide: float
) -> list[MicroBatch]:
    """Return one or two micro-batches to measure: one of them takes the most memory of all.

    It tries responses of the maximum length, of evenly spread lengths, and short ones, for which
    attention copies the prompt's keys most often. It returns the largest micro-batch that is alone
    in its update, and the largest of the others: they need memory for earlier gradients, too.
    `wide`: memory of a token, relative to that of a key in attention.
    """
    longest, same = cfg.generator.max_response_tokens, np.full(cfg.group_size, 1)
    spread = np.linspace(max(longest // 8, 1), longest, cfg.group_size).astype(int)
    tried = [same * longest, spread]
    tried += [same * short for short in (prompt // 2, prompt // 4) if 0 < short < longest]
    kept: dict[bool, MicroBatch] = {}
    for lengths in tried:
        batch = _largest(cfg.tokens_per_micro_batch, prompt, lengths, groups, ranks, flops)
        other = kept.get(batch.is_only)
        if other is None or _weight(batch.sequences, wide) > _weight(other.sequences, wide):
            kept[batch.is_only] = batch
    return list(kept.values())


def _largest(
    budget: int, prompt: int, lengths: NDArray[np.int64], groups: int, ranks: int, flops: ModelFlops
) -> MicroBatch:
    """Pack groups of responses of these lengths into micro-batches; return the largest one."""
    rounds = groups * (prompt + int(lengths.sum())) / ranks / budget
    planned = min(ranks, _MAX_RANKS) if rounds < _MAX_ROUNDS else 1
    sequences = []
    for group in range(math.ceil(groups * planned / ranks * min(1.0, _MAX_ROUNDS / rounds))):
        ids = np.full(prompt, group)
        sequences += [TokenSequence(ids, np.zeros(n, np.int64), 1.0) for n in lengths]
    plan = plan_micro_batches(parts_of(sequences), flops.layers, planned, budget)
    batches = [[sequences[i] for i in batch] for rank in plan for batch in rank if batch]
    largest = max(batches, key=lambda batch: _weight(batch, 1.0))
    return MicroBatch(largest, len(plan[0]) == 1)


def _weight(sequences: Sequence[TokenSequence], wide: float) -> float:
    """Return a micro-batch's relative memory: a key counts 1, a token `wide`, a mask nothing."""
    layout = arrange(parts_of(sequences), _META).layout
    keys = sum(block.keys.numel() for block in layout.padded.blocks)
    return wide * len(layout.positions) + keys


def trainer_memory(
    cfg: Settings, sizes: ModelSizes, prompt_tokens: int, device: Device
) -> RoleMemory:
    """Predict the memory of a trainer rank."""
    runs = (
        (training_bytes(cfg, _policy(cfg), batch.sequences, not batch.is_only), batch)
        for batch in _batches(cfg, sizes, prompt_tokens)
    )
    found, batch = max(runs, key=lambda each: _peak(each[0]))
    parts = {name: found[name] for name in (*_STATIC, "activations")}
    static = sum(parts[name] for name in _STATIC)
    push = _PUSHED_LAYERS * max(sizes.units) * DTYPES[cfg.dtype].itemsize
    total, host = _with_rest(max(_peak(found), static + push), batch), host_bytes(cfg, sizes)
    chunk = _above(found, "logits", static + parts["activations"])
    layer = _above(found, "layer", static + parts["activations"])
    if cfg.enable_activation_offloading:
        kept = min(_OFFLOADED_LAYERS / sizes.num_layers, 1.0)
        host["activations"] = parts["activations"]
        total -= int(parts["activations"] * (1 - kept))
        parts["activations"] = int(parts["activations"] * kept)
    if cfg.fsdp_cpu_offload:
        total -= static
        for name in _STATIC:
            host[name], parts[name] = parts[name], 0
    parts["work"] = max(total - sum(parts.values()), 0)
    if not device.is_gpu:
        parts, host = parts | host, {}
        total += sum(parts[name] for name in ("push", "checkpoint") if name in parts)
    else:
        parts["reserve"] = int(total * FRAGMENTATION) + GPU_PROCESS_BYTES
        parts["reserve"] += transfer_bytes(cfg, sizes)[0]
        total += parts["reserve"]
        if cfg.colocate and not cfg.fsdp_cpu_offload:
            host["optimizer"] = _PINNED * parts["optimizer"]
    longest = f"longest micro-batch {batch.tokens:,} of {cfg.tokens_per_micro_batch:,} tokens"
    notes = [f"{longest}; work: {gib(chunk)} GiB at a chunk of logits, {gib(layer)} in a layer"]
    memory = RoleMemory(
        "trainer", cfg.num_trainers, cfg.gpus_per_trainer, total, parts, host, notes
    )
    memory.resting = parts["weights"] + push + GPU_PROCESS_BYTES
    memory.smaller = _smaller(cfg, memory, chunk, prompt_tokens, device)
    return memory


def reference_memory(cfg: Settings, prompt_tokens: int, device: Device) -> RoleMemory:
    """Predict the memory of a reference."""
    whole = "num_references: a reference is whole on one GPU; allowed: 0, without a KL"
    memory = RoleMemory("reference", cfg.num_references, cfg.gpus_per_reference, smaller=whole)
    return _with_frozen_model(memory, cfg, _policy(cfg), prompt_tokens, device)


def teacher_memory(cfg: Settings, path: str, prompt_tokens: int, device: Device) -> RoleMemory:
    """Predict the memory of a teacher, from the config.json in its folder."""
    if not (Path(path) / "config.json").is_file():
        fail("teacher.path", f"no file {path}/config.json", "the folder of a model, for its sizes")
    whole = "teacher.path: a teacher is whole on one GPU; allowed: a smaller one"
    memory = RoleMemory("teacher", cfg.num_teachers, cfg.gpus_per_teacher, smaller=whole)
    return _with_frozen_model(memory, cfg, partial(hugging_face, path), prompt_tokens, device)


def _with_frozen_model(
    memory: RoleMemory,
    cfg: Settings,
    build_model: Callable[[], nn.Module],
    prompt_tokens: int,
    device: Device,
) -> RoleMemory:
    """Fill in, and return, the memory of a role that computes logprobs with a frozen model.

    If its weights fit, advice to lower `tokens_per_micro_batch` replaces `memory.smaller`.
    """
    with _META:
        flops = ModelFlops.of(build_model())
    batches = longest_micro_batches(cfg, prompt_tokens, 1, 1, flops, wide=10.0)
    runs = ((inference_bytes(cfg, build_model, batch.sequences), batch) for batch in batches)
    found, batch = max(runs, key=lambda each: _peak(each[0]))
    weights, memory.total = found["weights"], _with_rest(_peak(found), batch)
    memory.parts = {"weights": weights, "work": memory.total - weights}
    if device.is_gpu:
        memory.parts["reserve"] = int(memory.total * FRAGMENTATION) + GPU_PROCESS_BYTES
        memory.total += memory.parts["reserve"]
    memory.notes = [f"longest micro-batch {batch.tokens:,} tokens"]
    if weights <= 0.9 * device.nbytes * memory.share:
        given = f"tokens_per_micro_batch: {cfg.tokens_per_micro_batch} given"
        memory.smaller = f"{given}; allowed: less"
    return memory


def _batches(cfg: Settings, sizes: ModelSizes, prompt_tokens: int) -> list[MicroBatch]:
    groups = math.ceil(cfg.groups_per_step / cfg.updates_per_batch)
    ranks = cfg.num_trainers // cfg.tensor_parallel_dim
    kept, key = sizes.dim, 0  # per layer; with checkpointing only a layer's input is kept
    if not cfg.enable_activation_checkpointing:
        key = 2 * sizes.num_heads * sizes.head_dim
        kept = 10 * sizes.dim + 4 * sizes.intermediate
    token = sizes.num_layers * kept + 10 * sizes.dim + 6 * sizes.intermediate
    keys = sizes.num_layers * key + 4 * sizes.num_heads * sizes.head_dim
    return longest_micro_batches(cfg, prompt_tokens, groups, ranks, sizes.flops, token / keys)


def _peak(found: Bytes) -> int:
    return max(nbytes for name, nbytes in found.items() if name.startswith("peak of"))


def _with_rest(peak: int, batch: MicroBatch) -> int:
    """Add the bytes of losses, metrics and kernel workspaces to the passes' peak."""
    return int(_KERNELS * peak) + _BYTES_PER_TOKEN * batch.tokens


def _above(found: Bytes, part: str, base: int) -> int:
    """Return how far above `base` the bytes rise in the backward pass of `part`, e.g. of logits."""
    peaks = [n for name, n in found.items() if f"{part}," in name and "backward" in name]
    return max(max(peaks, default=base) - base, 0)


def host_bytes(cfg: Settings, sizes: ModelSizes) -> dict[str, int]:
    """Return purpose -> bytes of a rank's CPU memory: pushes, and copies for checkpoints."""
    bucket = sizes.largest_bucket(cfg.dtype, cfg.num_trainers)
    # A delta exists together with both snapshots compared, and may be as long as either.
    host = {"push": 3 * bucket if cfg.push == "delta" else bucket}
    if cfg.async_checkpoint:
        moments = 3 * 4 * sizes.trained  # float32 weights and two moments
        shards = cfg.num_trainers // cfg.data_parallel_replicate_dim  # tensor-parallel ones too
        host["checkpoint"] = moments // shards
    return host


def _smaller(
    cfg: Settings, memory: RoleMemory, chunk: int, prompt_tokens: int, device: Device
) -> str:
    """Return advice, `key: problem; allowed: ...`, that lowers a trainer's memory."""
    parts, room = memory.parts, device.nbytes * (cfg.gpus_per_trainer if device.is_gpu else 1)
    static = sum(parts[name] for name in _STATIC)
    if static > 0.6 * room:
        more = math.ceil(cfg.num_trainers * static / (0.5 * room))
        shards = cfg.data_parallel_replicate_dim
        if shards > 1:
            return f"data_parallel_replicate_dim: {shards} given; allowed: 1, for more shards"
        given = f"num_trainers: {cfg.num_trainers} given, whose shards take {gib(static)} GiB each"
        return f"{given}; allowed: {more} or more, or fsdp_cpu_offload: true"
    if not cfg.enable_activation_checkpointing:
        return "enable_activation_checkpointing: false given; allowed: true"
    if chunk > 2 * parts["activations"] and cfg.logprob_chunk_tokens > 256:
        given = f"logprob_chunk_tokens: {cfg.logprob_chunk_tokens} given"
        return f"{given}; allowed: {cfg.logprob_chunk_tokens // 2} or less"
    least = prompt_tokens + cfg.generator.max_response_tokens
    moving = memory.total - static
    budget = int(cfg.tokens_per_micro_batch * max(0.95 * room - static, 0) / moving)
    if budget >= least:
        given = f"tokens_per_micro_batch: {cfg.tokens_per_micro_batch} given"
        return f"{given}; allowed: {budget // 256 * 256 or least} or less"
    return "enable_activation_offloading: false given; allowed: true, or shorter responses"
