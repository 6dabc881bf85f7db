"""Tensor parallelism: which matrices of a layer are split over ranks, by model family."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torchtune.training import prepare_mha_for_tp

from grpo_components.errors import fail
from grpo_components.models.hugging_face_policy import base_of

Plan = dict[str, ParallelStyle]


def layer_plan(model_type: str) -> Plan:
    """Return the tensor-parallel plan for the layers of a torchtune model family.

    torchtune's plan also splits the vocabulary. Here FSDP shards the embedding and the output
    projection over all ranks, and the forward pass uses them whole: they may be one tied tensor.
    Also, a split vocabulary would need a reduction for every chunk of logprobs, and again when the
    chunk is recomputed.
    """
    if model_type == "QWEN2":  # `output_proj` and `w2`, which are summed over ranks, have no bias
        by_columns = ("attn.q_proj", "attn.k_proj", "attn.v_proj", "mlp.w1", "mlp.w3")
        by_rows = ("attn.output_proj", "mlp.w2")
        plan: Plan = {f"layers.*.{name}": ColwiseParallel() for name in by_columns}
        return plan | {f"layers.*.{name}": RowwiseParallel() for name in by_rows}
    from torchtune.models.llama3 import base_llama_tp_plan

    whole = base_llama_tp_plan()
    return {name: style for name, style in whole.items() if name.startswith("layers.")}


def transformers_plan(model: nn.Module) -> Plan:
    """Return the tensor-parallel plan for the layers of a transformers model, from its config."""
    config: Any = model.config
    given: dict[str, str] = config.get_text_config().base_model_tp_plan or {}
    plan = {name: style for name, style in given.items() if name.startswith("layers.")}
    kind = config.model_type
    if not plan:
        fail("tensor_parallel_dim", f"transformers has no plan for {kind}", "1")
    for name, style in plan.items():
        if style not in _STYLES:
            problem = f"transformers' plan for {kind} splits {name} as {style}, which is missing"
            fail("tensor_parallel_dim", problem, f"1, or a plan of {', '.join(_STYLES)}")
    return {name: _STYLES[style]() for name, style in plan.items()}


_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": partial(ColwiseParallel, output_layouts=Replicate()),
    "rowwise_split_input": partial(RowwiseParallel, input_layouts=Replicate()),
    # On norms of heads, [B, T, heads, head_dim], split at its third dimension: every rank has the
    # whole weight and applies it to its own heads, so that the gradient is summed over the ranks.
    "replicated_with_grad_allreduce": partial(
        SequenceParallel, sequence_dim=2, use_local_output=True
    ),
}
"""transformers' style -> torch's equivalent."""


def split_layers(model: nn.Module, mesh: DeviceMesh, model_type: str | None) -> None:
    """Split a decoder's layers over a tensor-parallel group, before FSDP shards the model."""
    if model_type is None:
        parallelize_module(base_of(model), mesh, transformers_plan(model))
        return
    parallelize_module(model, mesh, layer_plan(model_type))
    prepare_mha_for_tp(model, mesh)
