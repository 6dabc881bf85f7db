"""Clips gradients whose tensors are sharded over several device meshes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


def clip_grad_norm(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale gradients in place so that their total norm is at most `max_norm`; collective.

    `torch.nn.utils.clip_grad_norm_` rejects tensors on several meshes, which tensor parallelism
    produces. So this function computes one norm per mesh and combines the norms.
    """
    by_mesh: dict[object, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            by_mesh[mesh].append(parameter)
    norms = []
    for group in by_mesh.values():
        norm = get_total_norm([parameter.grad for parameter in group if parameter.grad is not None])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    if total.isfinite():
        for group in by_mesh.values():
            clip_grads_with_norm_(group, max_norm, total)
    return total
