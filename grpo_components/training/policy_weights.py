"""Loads a trainer rank's policy, and exports what a push or a checkpoint has of its weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from grpo_components.exchange.weights import StateDict
from grpo_components.models.hf_weights import file_converter
from grpo_components.models.loading import DTYPES, load_sharded_model
from grpo_components.models.lora import (
    AdapterNames,
    adapted_model,
    is_adapter,
    merged,
    new_adapters,
)
from grpo_components.models.meshes import Meshes, Sharding
from grpo_components.training.trainer_options import TrainerOptions
from grpo_components.training.weight_export import WeightExport


def load_policy(options: TrainerOptions, meshes: Meshes, sharding: Sharding) -> nn.Module:
    """Load the policy, sharded over the ranks; only rank 0 reads the base model's files."""
    build_model = options.build_model
    if options.lora is not None:
        build_model = partial(adapted_model, build_model, options.lora, options.dtype)
    return load_sharded_model(
        build_model,
        options.build_checkpointer,
        meshes,
        sharding,
        model_type=options.model_type,
        dtype=options.dtype,
        enable_activation_checkpointing=options.enable_activation_checkpointing,
        compile_layers=options.compile,
        new_weights=new_adapters,
    )


def weight_exports(
    policy: nn.Module, options: TrainerOptions, device: torch.device, rank: int, num_ranks: int
) -> list[WeightExport]:
    """Return the exports of a checkpoint; pushes send the first one."""
    to_hf = file_converter(policy, options.model_type, Path(options.base_model_path))

    def export(convert: Callable[[StateDict], StateDict], **which: Any) -> WeightExport:
        return WeightExport(
            policy, convert, DTYPES[options.dtype], device, rank, num_ranks, **which
        )

    lora = options.lora
    if lora is None:
        return [export(to_hf)]
    exports = [export(AdapterNames(to_hf), exported=is_adapter)]
    if lora.save_merged:
        exports.append(export(lambda layer: to_hf(merged(layer, lora.scale))))
    return exports
