"""Plans the memory of a whole run: every role, every GPU, and what does not fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial

import psutil
from torchtune import config

from grpo_components.config.files import check_splits
from grpo_components.config.preflight import gpus_of
from grpo_components.records import checkpoint_folder
from grpo_components.settings import Settings
from grpo_tools.memory_plan.generator_memory import generator_memory
from grpo_tools.memory_plan.model_sizes import ModelSizes
from grpo_tools.memory_plan.role_memory import GIB, Device, RoleMemory, gib
from grpo_tools.memory_plan.trainer_memory import reference_memory, teacher_memory, trainer_memory

_PEAK_FLOPS, _BYTES_PER_S = 989.4e12, 3.35e12
"""Peak rates of an H100 SXM: bf16 FLOP/s without sparsity, memory; from NVIDIA's data sheet."""
_TRAINED_SHARE, _FORWARD_SHARE, _READ_SHARE = 0.35, 0.45, 0.6
"""Shares of these peaks, assumed and not measured: FLOP/s of training, FLOP/s of a reference (which
reduces nothing over ranks), memory rate of decoding."""
_STEP_S, _STEP_PER_SEQUENCE_S = 2.4e-3, 22e-6
"""CPU seconds of an engine step, fixed and per sequence, while the GPU works: scheduler, launches,
outputs. Measured on an H100's machine: see docs/results/gpu.md."""
_SAMPLE_S = 0.3e-3
"""CPU seconds of environment and rewards per response, under the same interpreter lock."""
_MEAN_LENGTH = 0.4
"""Mean length of a response, as a share of the longest; assumed."""
_COLUMNS = (
    *("weights", "gradients", "optimizer", "activations"),
    *("work", "KV cache", "push", "checkpoint", "reserve"),
)
_SNAPSHOTS = 3
"""Maximum weight snapshots in the object store: the newest, one being read, one being stored."""
_DELTA_SNAPSHOTS = _SNAPSHOTS + 2
"""With delta pushes: also deltas of two snapshots, each at most a snapshot's size."""
_RAY_SHARE, _RAY_MAX_BYTES = 0.3, 200 * 10**9
"""Share of a node's memory that Ray takes for its object store by default, and its maximum."""


def object_store_bytes(cfg: Settings, sizes: ModelSizes) -> tuple[int, int]:
    """Return the maximum number of weight snapshots on a node with generators, and their bytes."""
    snapshots = _DELTA_SNAPSHOTS if cfg.push == "delta" else _SNAPSHOTS
    return snapshots, snapshots * sizes.snapshot_bytes(cfg.dtype)


def _host_lines(cfg: Settings, sizes: ModelSizes, roles: list[RoleMemory]) -> Iterator[str]:
    """Yield lines of text about the CPU memory that a run on GPUs needs."""

    def host(name: str) -> int:
        return sum(r.count * sum(r.host.values()) for r in roles if r.role == name)

    snapshots, nbytes = object_store_bytes(cfg, sizes)
    yield (
        f"push: {gib(sizes.snapshot_bytes(cfg.dtype))} GiB of weights; the object store of each "
        f"node has up to {snapshots} of them, {gib(nbytes)} GiB (object_store_memory; Ray takes "
        f"{_RAY_SHARE:.0%} of the node's memory, at most {gib(_RAY_MAX_BYTES)} GiB)"
    )
    yield (
        f"host: {gib(host('trainer'))} GiB of all trainers' buffers and copies, and "
        f"{gib(sizes.weight_bytes(cfg.dtype))} GiB in trainer_0 while it reads or saves a "
        "checkpoint"
    )
    if generators := host("generator"):
        what = "for delta pushes that they rebuild, or for weights while they sleep"
        yield f"host: {gib(generators)} GiB of all generators, {what}"


def _store_problem(cfg: Settings, sizes: ModelSizes) -> Iterator[str]:
    """Yield a problem if `object_store_memory` is too small for pushes."""
    given, (snapshots, needed) = cfg.object_store_memory, object_store_bytes(cfg, sizes)
    shown = f"{given} given"
    if given is None:
        given = _RAY_MAX_BYTES
        shown = f"null given, and Ray takes at most {gib(given)} GiB"
    if given < needed:
        taken = f"{snapshots} pushes take {gib(needed)} GiB; allowed: {needed} or more"
        yield f"object_store_memory: {shown}, and {taken}"


def plan_run(
    cfg: Settings,
    prompt_tokens: int,
    *,
    needs_reference: bool,
    num_gpus: int | None,
    gpu_gib: float,
) -> tuple[list[str], list[str]]:
    """Plan the memory of a run; return lines of text, and the problems: what does not fit.

    Each problem is a line `key: problem; allowed: ...`.
    """
    sizes = ModelSizes.of(partial(config.instantiate, cfg.model), cfg.lora)
    heads = {"num_attention_heads": sizes.num_heads, "num_key_value_heads": sizes.num_kv_heads}
    check_splits(cfg, {**heads, "intermediate_size": sizes.intermediate})
    is_gpu = cfg.device == "cuda"
    device = Device(is_gpu, gpu_gib if is_gpu else psutil.virtual_memory().total / GIB)
    roles = list(_roles(cfg, sizes, prompt_tokens, device, needs_reference))
    problems = [role.smaller for role in roles if role.role == "generator" and role.smaller]
    weights = gib(sizes.weight_bytes(cfg.dtype))
    lines = [f"{sizes.parameters:,} parameters, {weights} GiB in {cfg.dtype}"]
    if cfg.lora is not None:
        lines.append(f"{sizes.trained:,} parameters of adapters, which alone are trained")
    lines += _table(roles)
    lines += [f"{role.role}: {note}" for role in roles for note in role.notes]
    if is_gpu:
        placed = roles
        if cfg.colocate:
            generator, trainer, *others = roles
            together = in_turns(trainer, generator, device, _less_for_vllm(cfg))
            placed = [together, *others]
            lines += [f"{together.role}: {note}" for note in together.notes]
            problems += _start_problem(cfg, trainer, device)
        gpus = _place(placed)
        lines += _gpu_lines(gpus, device)
        problems += _gpu_problems(cfg, gpus, device, num_gpus)
        lines += _host_lines(cfg, sizes, roles)
        if {"generator", "trainer"} <= {role.role for role in roles}:
            cache = roles[0].parts["KV cache"]
            lines += _rate_lines(cfg, sizes, prompt_tokens, cache, needs_reference)
    else:
        needed = sum(role.count * role.total for role in roles) + GIB
        needed += object_store_bytes(cfg, sizes)[1]
        text = f"tensors and object store {gib(needed)} of {gib(device.nbytes)} GiB"
        lines.append(f"{text}; the libraries of each process come on top")
        if needed > device.nbytes:
            largest = max(roles, key=lambda role: role.count * role.total)
            problems.append(largest.smaller or f"num_{largest.role}s: too many; allowed: fewer")
    if cfg.trains:
        lines.append(_disk_line(cfg, sizes))
    problems += _store_problem(cfg, sizes)
    return lines, list(dict.fromkeys(problems))


def _roles(
    cfg: Settings, sizes: ModelSizes, prompt_tokens: int, device: Device, needs_reference: bool
) -> Iterator[RoleMemory]:
    """Yield the memory of each role that the run starts."""
    if not cfg.train_from:
        yield generator_memory(cfg, sizes, prompt_tokens, device)
    if not (cfg.eval_only or cfg.rollout_only):
        yield trainer_memory(cfg, sizes, prompt_tokens, device)
    if needs_reference and cfg.num_references and not cfg.eval_only:
        yield reference_memory(cfg, prompt_tokens, device)
    if cfg.teacher and cfg.trains:
        yield teacher_memory(cfg, cfg.teacher.path, prompt_tokens, device)


def in_turns(
    trainer: RoleMemory, generator: RoleMemory, device: Device, less_cache: str
) -> RoleMemory:
    """Return the memory of a trainer and a generator that share GPUs and work in turns.

    The peak is the total of the role that works, plus what the waiting role keeps on the GPU.
    `less_cache`: advice for a generator that does not fit.
    """
    generating, training = generator.total + trainer.resting, trainer.total + generator.resting
    note = f"{gib(generating)} GiB while it generates, {gib(trainer.resting)} of them the trainer's"
    note += f"; {gib(training)} while it trains, {gib(generator.resting)} of them the generator's"
    return RoleMemory(
        "trainer and generator in turns",
        trainer.count,
        trainer.share,
        max(generating, training),
        notes=[note],
        smaller=trainer.smaller if training > device.nbytes else less_cache,
    )


def _start_problem(cfg: Settings, trainer: RoleMemory, device: Device) -> Iterator[str]:
    """Yield a problem if a trainer leaves less memory free than vLLM requires when it starts."""
    given, most = cfg.generator.gpu_memory_utilization, 1 - trainer.resting / device.nbytes
    if given > most:
        problem = f"generator.gpu_memory_utilization: {given:g} given, which must be free when "
        problem += f"vLLM starts, and a trainer's weights take {gib(trainer.resting)} GiB"
        yield f"{problem}; allowed: at most {int(100 * most) / 100:g}"


def _disk_line(cfg: Settings, sizes: ModelSizes) -> str:
    lora = cfg.lora
    saved = 0 if lora and not lora.save_merged else sizes.parameters
    saved += sizes.trained if lora else 0
    each = checkpoint_folder.nbytes(cfg, saved, sizes.trained)
    most = checkpoint_folder.most_at_once(cfg)
    return (
        f"disk: {gib(each)} GiB a checkpoint, at most {most} at once (keep_last_n): "
        f"{gib(most * each)} GiB in output_dir"
    )


def _table(roles: Sequence[RoleMemory]) -> Iterator[str]:
    columns = [name for name in _COLUMNS if any(role.parts.get(name) for role in roles)]
    width = max(len(f"{role.count} x {role.role}") for role in roles) + 2
    yield f"{'GiB each':<{width}}{''.join(f'{name:>12}' for name in columns)}{'at most':>12}"
    for role in roles:
        cells = [gib(role.parts[name]) if role.parts.get(name) else "-" for name in columns]
        cells.append(gib(role.total))
        name = f"{role.count} x {role.role}"
        yield f"{name:<{width}}{''.join(f'{cell:>12}' for cell in cells)}"


def _place(roles: Sequence[RoleMemory]) -> list[list[RoleMemory]]:
    """Return the processes of each GPU, as Ray places them; generators are started last."""
    processes = [role for role in roles for _ in range(role.count)]
    started = sorted(processes, key=lambda process: process.role == "generator")
    placed = zip(started, gpus_of([process.share for process in started]), strict=True)
    gpus: dict[int, list[RoleMemory]] = {}
    for process, gpu in sorted(placed, key=lambda each: each[0].role != "generator"):
        gpus.setdefault(gpu, []).append(process)
    return list(gpus.values())


def _gpu_lines(gpus: Sequence[Sequence[RoleMemory]], device: Device) -> Iterator[str]:
    alike = Counter((" + ".join(role.role for role in gpu), _total(gpu)) for gpu in gpus)
    for (names, total), count in alike.items():
        used = f"{gib(total)} of {gib(device.nbytes)} GiB ({total / device.nbytes:.0%})"
        yield f"{count} GPUs with {names}: {used}"


def _total(gpu: Sequence[RoleMemory]) -> int:
    return sum(role.total for role in gpu)


def _gpu_problems(
    cfg: Settings,
    gpus: Sequence[Sequence[RoleMemory]],
    device: Device,
    num_gpus: int | None,
) -> Iterator[str]:
    if num_gpus is not None and len(gpus) > num_gpus:
        given = f"num_generators: {cfg.num_generators} with num_trainers: {cfg.num_trainers}"
        problem = f"{given} and the other roles need {len(gpus)} GPUs, and there are {num_gpus}"
        yield f"{problem}; allowed: fewer roles, or gpus_per_<role> below 1"
    for gpu in gpus:
        if _total(gpu) <= device.nbytes:
            continue
        if len(gpu) == 1:
            yield gpu[0].smaller or _less_for_vllm(cfg)
        elif any(role.role == "generator" for role in gpu):
            yield _less_for_vllm(cfg)
        else:
            yield next(role.smaller for role in gpu if role.smaller)


def _less_for_vllm(cfg: Settings) -> str:
    key = "gpu_memory_utilization" if cfg.generator.kv_cache_gib is None else "kv_cache_gib"
    given = f"generator.{key}: {getattr(cfg.generator, key):g} given"
    return f"{given}, too much beside what else is on its GPU; allowed: less"


def _rate_lines(
    cfg: Settings, sizes: ModelSizes, prompt_tokens: int, cache: int, needs_reference: bool
) -> Iterator[str]:
    """Yield lines of text: the token rates of roles on H100 GPUs, and which roles would wait.

    A decoding step reads all model weights and each sequence's KV cache, while one core prepares
    the next step: the slower of the two sets the rate. Training takes 3 times the FLOPs of a
    forward pass, or 4 times with activation checkpointing.
    """
    options, workers = cfg.generator, cfg.generator.tensor_parallel_size
    response = max(options.max_response_tokens * _MEAN_LENGTH, 1.0)
    per_token = sizes.kv_bytes_per_token(cfg.dtype, workers)
    length = prompt_tokens + response / 2  # half of a response is there, on average
    room = int(cache / (per_token * length))
    sequences = min(options.max_num_seqs, cfg.rollouts_in_flight * cfg.group_size, room)
    read = sizes.weight_bytes(cfg.dtype) / workers + sequences * length * per_token
    python_s = _STEP_S + sequences * (_STEP_PER_SEQUENCE_S + _SAMPLE_S / response)
    step_s = max(python_s, read / (_BYTES_PER_S * _READ_SHARE))  # scheduling is asynchronous
    forward = sizes.flops.layers(int(response), prompt_tokens)
    forward += sizes.flops.layers(prompt_tokens) / cfg.group_size
    forward += sizes.flops.per_logprob * response
    passes = cfg.ppo_epochs * (4 if cfg.enable_activation_checkpointing else 3)
    passes += needs_reference and not cfg.num_references  # LoRA: without adapters, a pass more
    per_gpu = _PEAK_FLOPS * response / forward
    rates = {
        "generators": cfg.num_generators * sequences / step_s,
        "trainers": cfg.num_trainers * _TRAINED_SHARE * per_gpu / passes,
    }
    if needs_reference and cfg.num_references:
        rates["references"] = cfg.num_references * _FORWARD_SHARE * per_gpu
    shown = ", ".join(f"{role} {rate:,.0f}" for role, rate in rates.items())
    yield f"estimate for H100 in tokens of responses per second (not measured): {shown}"
    bound = ": Python bounds their rate" if python_s == step_s else ""
    yield f"a generator's Python takes {python_s / step_s:.0%} of one core{bound}"
    if cfg.max_staleness == 0:
        yield "synchronous: they wait for each other in turn"
        return
    slowest = min(rates.values())
    waits = (f"{role} {1 - slowest / rate:.0%}" for role, rate in rates.items() if rate > slowest)
    yield f"so of their time would wait: {', '.join(waits)}"
