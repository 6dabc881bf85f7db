"""Loads the weights of a base model into models, sharded over ranks or whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
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
from grpo_components.models import hugging_face_attention as shared
from grpo_components.models.hugging_face_policy import (
    decoder_layers,
    folder_of,
    plain_name,
    prepared,
)
from grpo_components.models.meshes import Meshes, Sharding
from grpo_components.models.tensor_parallel import split_layers

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_FILE_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def load_whole_model(
    build_model: Callable[[], nn.Module],
    build_checkpointer: Callable[[], Any] | None,
    device: torch.device,
    dtype: str,
) -> nn.Module:
    """Load a whole frozen model, such as the reference, on one device in `dtype`."""
    with torch.device("meta"):
        path = folder_of(build_model())
    if path is not None:
        model = load_hugging_face(path, DTYPES[dtype]).to(device)
        return model.requires_grad_(False)
    with training.set_default_dtype(DTYPES[dtype]), device:
        model = build_model()
    assert build_checkpointer is not None, "preflight asks for a torchtune decoder's checkpointer"
    state_dict = build_checkpointer().load_checkpoint()[training.MODEL_KEY]
    model.load_state_dict(state_dict, strict=True)
    return model.requires_grad_(False).eval()


def load_sharded_model(
    build_model: Callable[[], nn.Module],
    build_checkpointer: Callable[[], Any] | None,
    meshes: Meshes,
    sharding: Sharding,
    *,
    model_type: str | None,
    dtype: str,
    enable_activation_checkpointing: bool,
    compile_layers: bool,
    new_weights: Callable[[nn.Module], dict[str, Tensor]] = lambda model: {},
) -> nn.Module:
    """Load the policy, with float32 master weights that FSDP2 shards.

    Only rank 0 reads the files. `new_weights` makes weights that they lack, such as adapters.
    """
    model = shard_model(
        build_model, meshes, sharding, model_type, dtype, enable_activation_checkpointing
    )
    full: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    path = folder_of(model)
    if dist.get_rank() == 0:
        if path is not None:
            full, buffers = read_weights(path)
        else:
            assert build_checkpointer is not None, "preflight asks for it"
            full = build_checkpointer().load_checkpoint()[training.MODEL_KEY]
        full |= new_weights(model)
    device = torch.device(meshes.layers.device_type)
    _scatter(model, full, device, sharding.cpu_offload)
    if path is not None:
        _broadcast_buffers(model, buffers, device)
    for module in model.modules():  # checkpoints lack buffers such as the rotary tables
        if hasattr(module, "rope_init"):
            with device:
                cast(Any, module).rope_init()
    if compile_layers:
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


def load_hugging_face(path: Path, dtype: torch.dtype | None = None) -> nn.Module:
    """Load a transformers model on the CPU; refuse files with missing or unexpected weights."""
    from transformers import AutoModelForCausalLM

    shared.register()
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        str(path),
        dtype=dtype or _dtype_of(path),
        attn_implementation=shared.NAME,
        local_files_only=True,
        trust_remote_code=False,
        output_loading_info=True,
    )
    model, found = loaded
    for what, names in found.items():
        if names:
            raise ValueError(f"model: {path} has {what.replace('_', ' ')}: {sorted(names)[0]}")
    return prepared(model)


def read_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Load a transformers model, and return its weights and its buffers, by their names in it.

    Buffers, such as tables of rotary frequencies, are in no file, and a model on the meta device
    has no values for them. So they are taken from a loaded model.
    """
    model = load_hugging_face(path)
    buffers = dict(model.named_buffers())
    return {name: t for name, t in model.state_dict().items() if name not in buffers}, buffers


def _dtype_of(path: Path) -> torch.dtype:
    """Return the floating-point dtype of the tensors in a model's files; float32 if they differ."""
    kinds: set[str] = set()
    for file in path.glob("*.safetensors"):
        with file.open("rb") as opened:
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        kinds |= {entry["dtype"] for name, entry in header.items() if name != "__metadata__"}
    kinds &= _FILE_DTYPES.keys()
    return _FILE_DTYPES[kinds.pop()] if len(kinds) == 1 else torch.float32
