"""Checks that weights can take the way to the generators that the key `weights` names."""

from __future__ import annotations

from grpo_components.errors import fail
from grpo_components.settings import Settings


def check_transfer(settings: Settings) -> None:
    """Refuse a way of the weights that the devices, or the roles' places on them, do not have."""
    way = settings.weights
    if way == "object_store":
        return
    if settings.push == "delta":
        fail("push", f"delta given with weights: {way}, which sends whole weights", "whole")
    if settings.train_from:
        fail("weights", f"{way} given with train_from, which has no vLLM engine", "object_store")
    if settings.device == "cpu" and way != "gloo":
        fail("weights", f"{way} given with device: cpu, which has no GPU", "object_store | gloo")
    if settings.device == "cuda" and way == "gloo":
        problem = "gloo given with device: cuda; it is what nccl does, on a CPU"
        fail("weights", problem, "object_store | nccl | ipc")
    if way == "ipc":
        _check_ipc(settings)
    if way == "nccl" and _together(settings, 1) <= 1:
        problem = f"nccl given with {_shares(settings)}, and NCCL lets no two roles share a GPU"
        fail("weights", problem, "object_store | ipc, or shares of more than 1 together")


def _check_ipc(settings: Settings) -> None:
    """Refuse what keeps the sender and a generator from sharing a GPU."""
    if settings.num_trainers > 1:  # vLLM's sender gathers over all ranks, in the midst of a step
        problem = f"ipc given with num_trainers: {settings.num_trainers}"
        fail("weights", problem, "object_store | nccl, or num_trainers: 1")
    if settings.ray.address is not None:
        problem = f"ipc given with ray.address: {settings.ray.address}, where Ray chooses the GPUs"
        fail("weights", problem, "object_store | nccl, or ray.address: null")
    workers = settings.generator.tensor_parallel_size
    if workers > 1:
        problem = f"ipc given with generator.tensor_parallel_size: {workers}, a GPU for each worker"
        fail("weights", problem, "object_store | nccl")
    if _together(settings, settings.num_generators) > 1:
        problem = f"ipc given with {_shares(settings)} and num_generators: "
        problem += f"{settings.num_generators}, which do not fit onto one GPU"
        fail("weights", problem, "object_store | nccl, or shares of at most 1 together")


def _together(settings: Settings, generators: int) -> float:
    """Return the GPUs of one trainer and some generators; they are the same ones in turns."""
    if settings.colocate:
        return 1
    return settings.gpus_per_trainer + generators * settings.gpus_per_generator


def _shares(settings: Settings) -> str:
    if settings.colocate:
        return "colocate: true"
    trainer, generator = settings.gpus_per_trainer, settings.gpus_per_generator
    return f"gpus_per_trainer: {trainer:g} and gpus_per_generator: {generator:g}"
