"""Layout of the trainer ranks: replicas, shards and tensor-parallel groups."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from grpo_components.rendezvous import Rendezvous


@dataclass(frozen=True)
class Sharding:
    """The configured layout of the trainer ranks, and where their tensors are kept."""

    replicate: int = 1
    """Number of replicas of the shards (HSDP); gradients are averaged over them."""
    tensor: int = 1
    """Number of ranks that compute each layer together, on the same tokens."""
    reduce_dtype: str = "fp32"
    """dtype in which gradients are reduced over ranks, fp32 or bf16."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in CPU memory; CUDA only."""
    offload_activations: bool = False
    """Keep activations for the backward pass in CPU memory; CUDA only."""


@dataclass(frozen=True)
class Meshes:
    """The device meshes that one rank belongs to."""

    layers: DeviceMesh
    """Mesh (shard) or (replicate, shard). Over it FSDP shards the layers or, with tensor
    parallelism, this rank's part of the layers."""
    root: DeviceMesh
    """The mesh `layers` with the tensor-parallel ranks as additional shards. Over it, FSDP
    shards what tensor parallelism does not split: the embedding and the output projection."""
    tensor: DeviceMesh
    """Mesh (tensor): consecutive ranks that compute each layer together, or one rank alone."""


def join_ranks(
    rank: int,
    num_ranks: int,
    rendezvous: Rendezvous,
    device: str,
    sharding: Sharding,
    timeout_s: float,
) -> Meshes:
    """Join the process group and arrange its ranks as replicate x shard x tensor."""
    backend = {"cpu": "gloo", "cuda": "nccl"}[device]
    if sharding.cpu_offload:  # the gradient norm is computed on the CPU, over gloo
        backend = "cpu:gloo,cuda:nccl"
    timeout = timedelta(seconds=timeout_s)
    store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        rendezvous.host,
        rendezvous.port,
        num_ranks,
        is_master=rank == 0,
        timeout=timeout,
        master_listen_fd=rendezvous.listener,
    )
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=timeout)
    return arrange_ranks(num_ranks, device, sharding)


def arrange_ranks(num_ranks: int, device: str, sharding: Sharding) -> Meshes:
    """Arrange the ranks of a process group as replicate x shard x tensor."""
    replicate, tensor = sharding.replicate, sharding.tensor
    shard = num_ranks // (replicate * tensor)
    whole = init_device_mesh(
        device, (replicate, shard, tensor), mesh_dim_names=("replicate", "shard", "tensor")
    )
    names = ("replicate", "shard") if replicate > 1 else "shard"
    if tensor == 1:
        return Meshes(whole[names], whole[names], whole["tensor"])
    # torch warns at every gather of a matrix split twice by rows; this order is intended here.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    flat = init_device_mesh(
        device, (replicate, shard * tensor), mesh_dim_names=("replicate", "shard_and_tensor")
    )
    root = flat if replicate > 1 else flat["shard_and_tensor"]
    return Meshes(whole[names], root, whole["tensor"])
