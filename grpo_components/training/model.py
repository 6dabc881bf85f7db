"""From a checkpoint on disk to torchtune decoders in memory, sharded over ranks or whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torchtune import training
from torchtune.modules import TransformerDecoder

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def load_whole_model(
    build_model: Callable[[], nn.Module],
    build_checkpointer: Callable[[], Any],
    device: torch.device,
    dtype: str,
) -> nn.Module:
    """Load the base model on one device, frozen, in its compute dtype.

    Args:
        build_model: makes the torchtune decoder.
        build_checkpointer: makes the torchtune checkpointer.
        device: where it lives.
        dtype: fp32 or bf16.
    """
    with training.set_default_dtype(DTYPES[dtype]), device:
        model = build_model()
    state_dict = build_checkpointer().load_checkpoint()[training.MODEL_KEY]
    model.load_state_dict(state_dict, strict=True)
    return model.requires_grad_(False).eval()


def load_sharded_model(
    build_model: Callable[[], nn.Module],
    build_checkpointer: Callable[[], Any],
    mesh: DeviceMesh,
    dtype: str,
    enable_activation_checkpointing: bool,
) -> TransformerDecoder:
    """Load the policy as float32 master shards with FSDP2; only rank 0 reads the checkpoint.

    Args:
        build_model: makes the torchtune decoder.
        build_checkpointer: makes the torchtune checkpointer; called on rank 0 only.
        mesh: one-dimensional mesh over the trainer ranks.
        dtype: compute dtype, fp32 or bf16; gradients are reduced in float32.
        enable_activation_checkpointing: recompute each layer in backward.
    """
    with training.set_default_dtype(torch.float32), torch.device("meta"):
        model = cast(TransformerDecoder, build_model())
    if enable_activation_checkpointing:
        training.set_activation_checkpointing(
            model, auto_wrap_policy={type(layer) for layer in model.layers}
        )
    policy = MixedPrecisionPolicy(param_dtype=DTYPES[dtype], reduce_dtype=torch.float32)
    # torchtune's shard_model takes no mixed-precision policy: bf16 masters lose updates of 1e-6.
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    full: dict[str, Tensor] = {}
    if mesh.get_rank() == 0:
        full = build_checkpointer().load_checkpoint()[training.MODEL_KEY]
    _scatter(model, full, mesh)
    for module in model.modules():  # buffers such as the rotary tables are in no checkpoint
        if hasattr(module, "rope_init"):
            with torch.device(mesh.device_type):
                cast(Any, module).rope_init()
    return model


def _scatter(model: nn.Module, full: dict[str, Tensor], mesh: DeviceMesh) -> None:
    device = torch.device(mesh.device_type)
    on_rank_0 = mesh.get_rank() == 0
    sharded: dict[str, nn.Parameter] = {}
    for name, parameter in model.state_dict().items():
        assert isinstance(parameter, DTensor), f"{name} is not sharded"
        if on_rank_0 and name not in full:
            raise ValueError(
                f"model: the checkpoint has no tensor for {name}; is `model` its builder?"
            )
        value = (
            full.pop(name).to(device, torch.float32)
            if on_rank_0
            else torch.empty(parameter.shape, dtype=torch.float32, device=device)
        )
        if value.shape != parameter.shape:
            raise ValueError(
                f"model: {name} has shape {list(parameter.shape)}, the checkpoint's "
                f"{list(value.shape)}; is `model` its builder?"
            )
        sharded[name] = nn.Parameter(
            distribute_tensor(value, parameter.device_mesh, parameter.placements)
        )
    if full:
        raise ValueError(f"model: the checkpoint's {sorted(full)[0]} is no tensor of `model`")
    model.load_state_dict(sharded, strict=True, assign=True)
