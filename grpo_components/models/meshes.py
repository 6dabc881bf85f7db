"""How the trainer's ranks are laid out: replicas, shards and tensor-parallel groups."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclass(frozen=True)
class Sharding:
    """What the config says of the layout, and of where and how shards are kept."""

    replicate: int = 1
    """Replicas of the shards (HSDP); gradients are averaged over them."""
    tensor: int = 1
    """Ranks that compute each layer together, on the same tokens."""
    reduce_dtype: str = "fp32"
    """fp32 or bf16: of gradients on their way between ranks."""
    cpu_offload: bool = False
    """Parameters, gradients and optimizer state in CPU memory; CUDA only."""
    offload_activations: bool = False
    """Activations kept for backward in CPU memory; CUDA only."""

    def num_data_ranks(self, num_ranks: int) -> int:
        """How many parts a batch is split into."""
        return num_ranks // self.tensor


@dataclass(frozen=True)
class Meshes:
    """The groups that one rank takes part in."""

    layers: DeviceMesh
    """(shard) or (replicate, shard): over it FSDP shards the layers, what tensor parallelism left
    to this rank of them."""
    root: DeviceMesh
    """The same, with the tensor-parallel ranks among the shards: over it FSDP shards what no plan
    splits and what is large, embedding and output projection."""
    tensor: DeviceMesh
    """(tensor), of size 1 without tensor parallelism; its ranks are neighbours."""


def join_ranks(
    rank: int, num_ranks: int, rendezvous: str, device: str, sharding: Sharding, timeout_s: float
) -> Meshes:
    """Enter the process group and lay its ranks out as replicate x shard x tensor.

    Args:
        rank: of this process.
        num_ranks: of the group; a multiple of replicate x tensor.
        rendezvous: file through which the ranks find each other, on a path that all share.
        device: cpu or cuda.
        sharding: sizes of the layout.
        timeout_s: a collective that waits longer raises.
    """
    backend = {"cpu": "gloo", "cuda": "nccl"}[device]
    if sharding.cpu_offload:  # the norm of gradients that lie on the CPU goes over gloo
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backend,
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=timeout_s),
    )
    replicate, tensor = sharding.replicate, sharding.tensor
    shard = num_ranks // (replicate * tensor)
    whole = init_device_mesh(
        device, (replicate, shard, tensor), mesh_dim_names=("replicate", "shard", "tensor")
    )
    names = ("replicate", "shard") if replicate > 1 else "shard"
    if tensor == 1:
        return Meshes(whole[names], whole[names], whole["tensor"])
    # It warns of every gather of a matrix that is split twice by rows: the order is what we want.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    flat = init_device_mesh(
        device, (replicate, shard * tensor), mesh_dim_names=("replicate", "shard_and_tensor")
    )
    root = flat if replicate > 1 else flat["shard_and_tensor"]
    return Meshes(whole[names], root, whole["tensor"])
