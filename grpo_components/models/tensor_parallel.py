"""Which matrices of a layer are split over the ranks of a tensor-parallel group, by family."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torchtune.training import prepare_mha_for_tp

FAMILIES = ("LLAMA3", "LLAMA3_2", "QWEN2")
"""Those with a plan. torchtune 0.6.1 has one, for Llama 3; that of Qwen2 and 2.5 is ours."""

Plan = dict[str, ParallelStyle]


def qwen2_plan() -> Plan:
    """The plan of Qwen2 and Qwen2.5.

    Whole heads, and columns of the feed-forward, go to each rank. The biases of q, k and v are
    split with their rows. `output_proj` and `w2`, whose products are summed over the ranks, have
    no bias that the sum could count more than once.
    """
    by_columns = ("attn.q_proj", "attn.k_proj", "attn.v_proj", "mlp.w1", "mlp.w3")
    plan: Plan = {f"layers.*.{name}": ColwiseParallel() for name in by_columns}
    return plan | {f"layers.*.{name}": RowwiseParallel() for name in ("attn.output_proj", "mlp.w2")}


def layer_plan(model_type: str) -> Plan:
    """The plan of a family, for its layers only.

    torchtune's also splits the vocabulary. Here embedding and output projection stay whole in the
    forward pass, and FSDP shards them over all ranks: they may be one tied tensor, and logprobs of
    a split vocabulary would need a reduction for every chunk, in forward and in recomputation.

    Args:
        model_type: torchtune's name of the family, one of FAMILIES.
    """
    if model_type == "QWEN2":
        return qwen2_plan()
    from torchtune.models.llama3 import base_llama_tp_plan

    plan = base_llama_tp_plan()
    return {name: style for name, style in plan.items() if name.startswith("layers.")}


def split_layers(model: nn.Module, mesh: DeviceMesh, model_type: str) -> None:
    """Split a decoder's layers over a tensor-parallel group, before FSDP shards what is left.

    Args:
        model: a torchtune TransformerDecoder, on the meta device.
        mesh: one-dimensional; its size divides the numbers of heads and of key-value heads.
        model_type: torchtune's name of the family, one of FAMILIES.
    """
    parallelize_module(model, mesh, layer_plan(model_type))
    prepare_mha_for_tp(model, mesh)
