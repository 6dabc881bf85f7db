"""Tensor parallelism: which matrices of a layer are split over ranks, by model family."""

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
"""Families with a plan: Llama 3 from torchtune 0.6.1, Qwen2 and Qwen2.5 from here."""

Plan = dict[str, ParallelStyle]


def qwen2_plan() -> Plan:
    """The plan of Qwen2 and Qwen2.5.

    Each rank gets whole heads, and columns of the feed-forward network. The biases of q, k and v
    are split with their rows. `output_proj` and `w2`, whose outputs are summed over the ranks, have
    no bias, which the sum would count more than once.
    """
    by_columns = ("attn.q_proj", "attn.k_proj", "attn.v_proj", "mlp.w1", "mlp.w3")
    plan: Plan = {f"layers.*.{name}": ColwiseParallel() for name in by_columns}
    return plan | {f"layers.*.{name}": RowwiseParallel() for name in ("attn.output_proj", "mlp.w2")}


def layer_plan(model_type: str) -> Plan:
    """The plan of a family, for its layers only.

    torchtune's plan also splits the vocabulary. Here embedding and output projection stay whole in
    the forward pass, and FSDP shards them over all ranks: they may be one tied tensor, and a split
    vocabulary would need a reduction for every chunk of logprobs, also in recomputation.

    Args:
        model_type: torchtune's name of the family, one of FAMILIES.
    """
    if model_type == "QWEN2":
        return qwen2_plan()
    from torchtune.models.llama3 import base_llama_tp_plan

    plan = base_llama_tp_plan()
    return {name: style for name, style in plan.items() if name.startswith("layers.")}


def split_layers(model: nn.Module, mesh: DeviceMesh, model_type: str) -> None:
    """Split a decoder's layers over a tensor-parallel group; call it before FSDP shards the rest.

    Args:
        model: a torchtune TransformerDecoder, on the meta device.
        mesh: one-dimensional; its size divides the numbers of heads and of key-value heads.
        model_type: torchtune's name of the family, one of FAMILIES.
    """
    parallelize_module(model, mesh, layer_plan(model_type))
    prepare_mha_for_tp(model, mesh)
