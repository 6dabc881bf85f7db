"""Predicts a generator's memory: weights, vLLM's largest step, and how many sequences fit."""

from __future__ import annotations

from grpo_components.models.loading import DTYPES
from grpo_components.models.lora import reserved_rank
from grpo_components.settings import Settings
from grpo_components.training.weight_sender import BUFFER_BYTES
from grpo_tools.memory_plan.model_sizes import ModelSizes
from grpo_tools.memory_plan.role_memory import GIB, GPU_PROCESS_BYTES, Device, RoleMemory, gib

_LARGE_GPU_GIB, _TOKENS_LARGE, _TOKENS_SMALL = 70, 16384, 8192
"""Size of a large GPU; vLLM 0.32's default max_num_batched_tokens on large and smaller GPUs."""
_MAX_WEIGHTS = 0.8
"""Share of a GPU above which model weights leave too little memory for a KV cache."""
_GRAPHS_BYTES = GIB
"""Bytes of the CUDA graphs of one engine; not measured by us."""
_LOGIT_COPIES = 4
"""float32 copies of a step's logits in vLLM's sampler: raw, processed, logprobs, probabilities."""


def generator_memory(
    cfg: Settings, sizes: ModelSizes, prompt_tokens: int, device: Device
) -> RoleMemory:
    """Predict the memory of one worker of a generator.

    On a GPU, vLLM takes the share `gpu_memory_utilization` of the memory. The KV cache gets what
    model weights, the tensors of a step and CUDA graphs leave, unless `kv_cache_gib` sets its size.
    While new weights are loaded, a copy of one layer (or of another tensor) comes on top.
    """
    options, itemsize = cfg.generator, DTYPES[cfg.dtype].itemsize
    workers = options.tensor_parallel_size
    length = options.max_model_len or prompt_tokens + options.max_response_tokens
    weights = sizes.weight_bytes(cfg.dtype) // workers
    lora = cfg.lora
    if lora is not None:
        weights += sizes.snapshot_bytes(cfg.dtype) * reserved_rank(lora) // lora.rank
    parts = {"weights": weights, "work": _work(cfg, sizes, device)}
    if device.is_gpu:
        graphs = 0 if options.enforce_eager else _GRAPHS_BYTES
        parts["reserve"] = GPU_PROCESS_BYTES + graphs
    budget = int(options.gpu_memory_utilization * device.nbytes)
    cache = int((options.kv_cache_gib or 0.0) * GIB) // workers
    if not cache:
        cache = budget - sum(parts.values()) if device.is_gpu else GIB
    parts["KV cache"] = max(cache, 0)
    loading = max(sizes.units) * itemsize // workers + transfer_bytes(cfg, sizes)[1]
    # Of the generator, not of its workers: the bytes that the next delta is applied to.
    host = {"push": sizes.snapshot_bytes(cfg.dtype) // workers} if cfg.push == "delta" else {}
    if cfg.colocate and device.is_gpu and lora is not None:
        host["weights"] = weights
    if not device.is_gpu:
        parts, host = parts | host, {}
    total = sum(parts.values()) + loading
    parts["reserve"] = parts.get("reserve", 0) + loading
    sequence = sizes.kv_bytes_per_token(cfg.dtype, workers) * length
    fits, wanted = max(cache, 0) // sequence, _wanted(cfg)
    at_once = min(wanted, options.max_num_seqs)
    many = f"{fits:,} sequences of {length:,} tokens fit into the KV cache"
    notes = [f"{many}; {at_once:,} run at once, of {wanted:,} that a generator has room for"]
    if fits < at_once:
        notes.append(f"where more than {fits:,} are so long, vLLM recomputes the others later")
    count, share = cfg.num_generators * workers, cfg.gpus_per_generator
    memory = RoleMemory("generator", count, share, total, parts, host, notes)
    memory.resting = parts["reserve"] - loading  # vLLM's sleep frees neither context nor graphs
    if fits < 1 or (device.is_gpu and weights > _MAX_WEIGHTS * device.nbytes):
        memory.smaller = _smaller(cfg, weights, cache, sequence, device)
    return memory


def transfer_bytes(cfg: Settings, sizes: ModelSizes) -> tuple[int, int]:
    """Return GPU bytes of a weight transfer: (on the first trainer rank, on a generator's worker).

    By vLLM's source, each end has two NCCL buffers, and the sender packs a third. A buffer exceeds
    `BUFFER_BYTES` by at most one tensor. Both results are 0 unless NCCL transfers the weights.
    """
    largest = sizes.dim * max(sizes.vocabulary, sizes.intermediate) * DTYPES[cfg.dtype].itemsize
    if cfg.weights == "nccl":
        return 3 * (BUFFER_BYTES + largest), 2 * (BUFFER_BYTES + largest)
    return 0, 0


def _work(cfg: Settings, sizes: ModelSizes, device: Device) -> int:
    """Return the bytes of vLLM's largest step: hidden states, and the sampler's logits."""
    options, itemsize = cfg.generator, DTYPES[cfg.dtype].itemsize
    workers = options.tensor_parallel_size
    tokens = _TOKENS_LARGE if device.gib >= _LARGE_GPU_GIB else _TOKENS_SMALL
    if not device.is_gpu:
        tokens = 4096
    layer = 4 * sizes.dim + 3 * sizes.intermediate // workers
    logits = min(options.max_num_seqs, _wanted(cfg)) * sizes.vocabulary * 4 * _LOGIT_COPIES
    return tokens * layer * itemsize + logits


def _wanted(cfg: Settings) -> int:
    return cfg.rollouts_in_flight * cfg.group_size


def _smaller(cfg: Settings, weights: int, cache: int, sequence: int, device: Device) -> str:
    """Return advice, `key: problem; allowed: ...`, that makes room for at least one sequence."""
    options = cfg.generator
    splits = device.is_gpu and weights + sequence > _MAX_WEIGHTS * device.nbytes
    if not splits and (not device.is_gpu or options.kv_cache_gib is not None):
        given = options.kv_cache_gib or 1.0
        problem = f"generator.kv_cache_gib: {given:g} given, and a sequence takes {gib(sequence)}"
        return f"{problem} GiB; allowed: {gib(1.05 * sequence)} or more"
    workers, memory = options.tensor_parallel_size, options.gpu_memory_utilization
    if memory < 0.9 * cfg.gpus_per_generator and not splits:
        problem = f"generator.gpu_memory_utilization: {memory:g} given, {gib(-cache)} GiB too "
        return f"{problem}little; allowed: up to gpus_per_generator: {cfg.gpus_per_generator:g}"
    problem = f"generator.tensor_parallel_size: {workers} given, and weights of {gib(weights)} GiB"
    return f"{problem} leave no room for a sequence; allowed: {2 * workers} or more"
