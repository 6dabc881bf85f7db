"""The norm of a gradient whose tensors are sharded over several meshes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


def clip_grad_norm(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale gradients down to a largest total norm, in place; collective.

    `torch.nn.utils.clip_grad_norm_` refuses tensors of more than one mesh, which is what tensor
    parallelism leaves: norms are taken mesh by mesh.

    Args:
        parameters: with gradients or without.
        max_norm: of all gradients together; infinity only measures.

    Returns:
        The norm before clipping, a scalar, the same on every rank. Where it is not finite, the
        gradients stay as they are: scaling by it would hide which of them is at fault.
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
