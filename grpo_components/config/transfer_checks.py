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
    if settings.device == "cpu":
        fail("weights", f"{way} given with device: cpu, which has no GPU", "object_store")
    trainer, generator = settings.gpus_per_trainer, settings.gpus_per_generator
    if settings.colocate or trainer + generator <= 1:
        shares = f"gpus_per_trainer: {trainer:g} and gpus_per_generator: {generator:g}"
        problem = f"{way} given with {'colocate: true' if settings.colocate else shares}"
        problem += ", and NCCL lets no two roles share a GPU"
        fail("weights", problem, "object_store, or shares of more than 1 together")
