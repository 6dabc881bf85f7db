"""Checks the trainer's config keys: ranks, memory, optimizer and compiler."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from typing import Any

from omegaconf import DictConfig

from grpo_components.errors import fail
from grpo_components.models.tensor_parallel import FAMILIES
from grpo_components.settings import Settings, biasing

MAX_GENERATOR_KL = {"fp32": 1e-4, "bf16": 0.05}
"""Default upper bound of the KL (estimator k3) between trainer and generator, by `dtype`.

In nats per token, over responses sampled entirely by the policy version that trains on them;
docs/training.md has the reasons."""


def check_training(settings: Settings) -> None:
    """Check keys of the trainer against each other and against this machine."""
    _check_ranks(settings)
    if settings.device == "cpu":
        _check_cpu(settings)
    if settings.enable_activation_offloading and not settings.enable_activation_checkpointing:
        problem = "true given without checkpointing: every intermediate value would be copied"
        allowed = "false, or enable_activation_checkpointing: true"
        fail("enable_activation_offloading", problem, allowed)
    _check_optimizer(settings.optimizer, settings.device)
    if settings.compile:
        if settings.tensor_parallel_dim > 1:
            problem = f"true given with tensor_parallel_dim: {settings.tensor_parallel_dim}, and "
            problem += "torch.compile fails on layers that are split over ranks"
            fail("compile", problem, "false, or tensor_parallel_dim: 1")
        _check_compiler("compile", "true given", settings.device, "false")


def check_heads(tensor: int, hf_config: dict[str, Any]) -> None:
    """Check that the trainer's tensor parallelism can split the layers of a checkpoint."""
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        size = hf_config.get(name) or tensor
        if size % tensor:
            problem = f"{tensor} given, and the model's {name} is {size}"
            fail("tensor_parallel_dim", problem, f"a divisor of {size}")


def default_bound(settings: Settings) -> float | None:
    """Return the default of `max_generator_kl`."""
    drops = settings.lora is not None and settings.lora.dropout > 0
    return None if drops or biasing(settings.generator) else MAX_GENERATOR_KL[settings.dtype]


def _check_cpu(settings: Settings) -> None:
    for key in ("dtype", "reduce_dtype"):
        if (given := getattr(settings, key)) != "fp32":
            problem = f"{given} given with device: cpu, where rounding saves nothing"
            fail(key, problem, "fp32, or device: cuda")
    for key in ("enable_activation_offloading", "fsdp_cpu_offload"):
        if getattr(settings, key):
            problem = "true given with device: cpu, where everything is in CPU memory already"
            fail(key, problem, "false, or device: cuda")


def _check_optimizer(node: DictConfig, device: str) -> None:
    path = node["_component_"]
    name = path.rpartition(".")[2]
    if not path.startswith("torchao."):
        return
    allowed = "torch.optim.AdamW, torchao.optim.AdamW8bit"
    if name == "CPUOffloadOptimizer":
        problem = f"{path} given, which takes gradients away during backward: before they are "
        problem += "clipped and checked for NaN"
        fail("optimizer", problem, f"{allowed}, on CUDA with fsdp_cpu_offload: true")
    if name.endswith(("4bit", "Fp8")):
        problem = f"{path} given, whose step fails on parameters that FSDP2 has sharded"
        fail("optimizer", problem, allowed)
    if node.get("eps") is None:
        problem = f"{path} given without eps: 8 bits round small second moments to 0, and with the "
        problem += "default of 1e-8 such parameters then move many times too far"
        fail("optimizer", problem, "optimizer.eps not small against your gradients (1e-5, say)")
    _check_compiler(
        "optimizer", f"{path} given, whose step is compiled", device, "torch.optim.AdamW"
    )


def _check_ranks(settings: Settings) -> None:
    ranks, tensor = settings.num_trainers, settings.tensor_parallel_dim
    replicate = settings.data_parallel_replicate_dim
    model_type = settings.model_type
    if tensor > 1 and model_type is not None and model_type not in FAMILIES:
        problem = f"{tensor} given, and there is no tensor-parallel plan for {model_type}"
        fail("tensor_parallel_dim", problem, f"1, or one of {', '.join(FAMILIES)}")
    if ranks % tensor:
        problem = f"{tensor} given, which does not divide num_trainers: {ranks}"
        fail("tensor_parallel_dim", problem, "a divisor of num_trainers")
    parts = ranks // tensor
    if parts % replicate:
        problem = f"{replicate} given, which does not divide "
        problem += f"num_trainers / tensor_parallel_dim = {parts}"
        fail("data_parallel_replicate_dim", problem, f"a divisor of {parts}")
    samples = settings.groups_per_step * settings.group_size
    if parts * settings.updates_per_batch > samples:
        problem = f"{ranks} given, and a step has {samples} samples"
        allowed = f"num_trainers / tensor_parallel_dim x updates_per_batch at most {samples}"
        fail("num_trainers", problem, allowed)


def _check_compiler(key: str, given: str, device: str, otherwise: str) -> None:
    compiler = os.environ.get("CXX", "g++").partition(" ")[0]
    if shutil.which(compiler) is None:
        problem = f"{given}, and torch.compile finds no C++ compiler ({compiler})"
        fail(key, problem, f"{otherwise}, or a compiler on the PATH or in CXX")
    if device == "cuda" and find_spec("triton") is None:
        problem = f"{given}, and torch.compile needs the package triton on CUDA"
        fail(key, problem, f"{otherwise}, or `pip install triton` first")
