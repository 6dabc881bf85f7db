"""Loads the policy that a trainer rank trains, sharded over the ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torchtune import training

from grpo_components.exchange.weights import check_names_and_shapes, shapes_of
from grpo_components.models.hugging_face_policy import decoder_layers, folder_of, plain_name
from grpo_components.models.loading import DTYPES, read_weights
from grpo_components.models.lora import adapted_model, new_adapters
from grpo_components.models.meshes import Meshes, Sharding
from grpo_components.models.tensor_parallel import split_layers
from grpo_components.training.trainer_options import TrainerOptions


def load_policy(options: TrainerOptions, meshes: Meshes) -> nn.Module:
    """Load the policy, with float32 master weights that FSDP2 shards; only rank 0 reads files."""
    build_model, sharding = options.build_model, options.sharding
    if options.lora is not None:
        build_model = partial(adapted_model, build_model, options.lora, options.dtype)
    checkpointing = options.enable_activation_checkpointing
    model = shard_model(
        build_model, meshes, sharding, options.model_type, options.dtype, checkpointing
    )
    full: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    path = folder_of(model)
    if dist.get_rank() == 0:
        if path is not None:
            full, buffers = read_weights(path)
        else:
            assert options.build_checkpointer is not None, "preflight asks for it"
            full = options.build_checkpointer().load_checkpoint()[training.MODEL_KEY]
        full |= new_adapters(model)
    device = torch.device(meshes.layers.device_type)
    _scatter(model, full, device, sharding.cpu_offload)
    if path is not None:
        _broadcast_buffers(model, buffers, device)
    for module in model.modules():  # checkpoints lack buffers such as the rotary tables
        if hasattr(module, "rope_init"):
            with device:
                cast(Any, module).rope_init()
    if options.compile:
        for layer in decoder_layers(model):
            layer.compile()
    return model


def shard_model(
    build_model: Callable[[], nn.Module],
    meshes: Meshes,
    sharding: Sharding,
    model_type: str | None,
    dtype: str,
    enable_activation_checkpointing: bool,
) -> nn.Module:
    """Build the policy in float32, sharded with FSDP2, on the meta device (without values)."""
    with training.set_default_dtype(torch.float32), torch.device("meta"):
        model = build_model()
    if sharding.tensor > 1:  # first, because wrapping changes the names that plans use
        split_layers(model, meshes.tensor, model_type)
    if enable_activation_checkpointing:
        training.set_activation_checkpointing(
            model, auto_wrap_policy={type(layer) for layer in decoder_layers(model)}
        )
    policy = MixedPrecisionPolicy(
        param_dtype=DTYPES[dtype], reduce_dtype=DTYPES[sharding.reduce_dtype]
    )
    offload = CPUOffloadPolicy() if sharding.cpu_offload else OffloadPolicy()
    # torchtune's shard_model has no mixed precision: bf16 weights would lose updates of 1e-6.
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=meshes.layers, mp_policy=policy, offload_policy=offload)
    fully_shard(model, mesh=meshes.root, mp_policy=policy, offload_policy=offload)
    return model


def _scatter(
    model: nn.Module, full: dict[str, Tensor], device: torch.device, cpu_offload: bool
) -> None:
    on_rank_0 = dist.get_rank() == 0
    sharded: dict[str, nn.Parameter] = {}
    buffers = {plain_name(name) for name, _ in model.named_buffers()}
    state = {name: value for name, value in model.state_dict().items() if name not in buffers}
    if on_rank_0:
        check_names_and_shapes(shapes_of(full), shapes_of(state))
    for name, parameter in state.items():
        assert isinstance(parameter, DTensor), f"{name} is not sharded"
        if on_rank_0:
            value = full.pop(name).to(device, parameter.dtype)
        else:
            value = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        if parameter.device_mesh.size() < dist.get_world_size():
            # There are several such meshes, and the first rank of each one needs the tensor.
            dist.broadcast(value, src=0)
        shard = distribute_tensor(value, parameter.device_mesh, parameter.placements)
        sharded[name] = nn.Parameter(shard.cpu() if cpu_offload else shard)
    model.load_state_dict(sharded, strict=False, assign=True)  # without the buffers


def _broadcast_buffers(model: nn.Module, full: dict[str, Tensor], device: torch.device) -> None:
    """Copy rank 0's buffers to all ranks: in a model from the meta device, they have no values."""
    for name, buffer in model.named_buffers():
        owner, _, own_name = name.rpartition(".")
        value = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
        if dist.get_rank() == 0:
            value.copy_(full[plain_name(name)])
        dist.broadcast(value, src=0)
        model.get_submodule(owner)._buffers[own_name] = value
