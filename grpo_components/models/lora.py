"""Puts low-rank adapters (LoRA, arXiv 2106.09685) on a policy, and gives them peft's names."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torchtune import training
from torchtune.modules.peft import LoRALinear

from grpo_components.exchange.weights import StateDict, checkpoint_shapes
from grpo_components.models.loading import DTYPES
from grpo_components.settings import LoraSettings

_HF_NAMES = {"output_proj": "o_proj", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
"""torchtune's names of linear layers -> Hugging Face's, where they differ."""
ADAPTER_FOLDER = "adapter"
"""Name of a checkpoint's folder that holds the adapter."""
ADAPTER_FILE = "adapter_model.safetensors"
_VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_PEFT_PREFIX = "base_model.model."
_A, _B = "lora_a.weight", "lora_b.weight"


def reserved_rank(lora: LoraSettings) -> int:
    """Round an adapter's rank up to the nearest rank for which vLLM can reserve memory."""
    return next(rank for rank in _VLLM_RANKS if rank >= lora.rank)


def peft_config(lora: LoraSettings, base_model_path: str) -> dict[str, Any]:
    """Return the contents of `adapter_config.json`, which describes an adapter to peft."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model_path,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": list(lora.target_modules),
        "bias": "none",
        "inference_mode": True,
    }


def read_adapter_options(folder: Path) -> LoraSettings:
    """Read a LoRA adapter's options from the `adapter_config.json` in its folder."""
    file = folder / "adapter_config.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        numbers = {"rank": int(found["r"]), "alpha": float(found["lora_alpha"])}
        return LoraSettings(**numbers, target_modules=found["target_modules"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} does not describe a LoRA adapter: {error!r}") from error


def adapted_model(
    build_model: Callable[[], nn.Module], lora: LoraSettings, dtype: str
) -> nn.Module:
    """Build a policy whose target layers have adapters, and freeze everything else.

    Frozen parameters are in the compute dtype, because no update changes them; the adapters are
    float32 master weights.
    """
    model = build_model().requires_grad_(False)
    for parameter in model.parameters():  # not buffers: rotary tables stay float32
        parameter.data = parameter.data.to(DTYPES[dtype])
    for path, module in list(model.named_modules()):
        parent, _, name = path.rpartition(".")
        if _HF_NAMES.get(name, name) in lora.target_modules and isinstance(module, nn.Linear):
            setattr(model.get_submodule(parent), name, _adapted(module, lora))
    return model


def _adapted(linear: nn.Linear, lora: LoraSettings) -> LoRALinear:
    with training.set_default_dtype(torch.float32), linear.weight.device:
        layer = LoRALinear(
            linear.in_features, linear.out_features, lora.rank, lora.alpha, lora.dropout
        )
    layer.weight, layer.bias = linear.weight, linear.bias
    return layer


def new_adapters(model: nn.Module) -> StateDict:
    """Return initial adapter weights by name in the policy: matrix A is random, matrix B is 0."""
    random = torch.Generator().manual_seed(torch.initial_seed())
    adapters: StateDict = {}
    for name, parameter in model.state_dict().items():
        if is_adapter(name):
            adapters[name] = torch.zeros(parameter.shape)
            if name.endswith(_A):  # as LoRALinear does
                nn.init.kaiming_uniform_(adapters[name], a=math.sqrt(5), generator=random)
    return adapters


def is_target(name: str, lora: LoraSettings) -> bool:
    """Whether a weight belongs to a layer that gets an adapter."""
    path, _, kind = name.rpartition(".")
    layer = path.rpartition(".")[2]
    is_in_layer = "layers." in name and ".experts." not in name
    return kind == "weight" and is_in_layer and _HF_NAMES.get(layer, layer) in lora.target_modules


def is_adapter(name: str) -> bool:
    """Whether a parameter of an adapted policy belongs to an adapter."""
    return name.endswith((f".{_A}", f".{_B}"))


def engine_scale(name: str, lora: LoraSettings) -> float:
    """Return the factor by which vLLM multiplies a tensor when storing it; `name` is as in peft."""
    return lora.scale if name.endswith("lora_B.weight") else 1.0


def adapted_layers(model: nn.Module) -> set[str]:
    """Return Hugging Face's names of the kinds of linear layers that have an adapter."""
    paths = (name.removesuffix(f".{_A}") for name in model.state_dict() if name.endswith(f".{_A}"))
    return {_HF_NAMES.get(name, name) for name in (path.rpartition(".")[2] for path in paths)}


def pushed_shapes(base: Path, lora: LoraSettings | None) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors sent to generators: with LoRA, only those of adapters."""
    whole = checkpoint_shapes(base)
    if lora is None:
        return whole
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in whole.items():
        if is_target(name, lora):
            rows, columns = shape
            shapes[_peft_name(name, "lora_A")] = (lora.rank, columns)
            shapes[_peft_name(name, "lora_B")] = (rows, lora.rank)
    return shapes


def adapter_tensors(tensors: StateDict) -> StateDict:
    """Select the tensors that belong to adapters, which have peft's names."""
    return {name: t for name, t in tensors.items() if name.startswith(_PEFT_PREFIX)}


class AdapterNames:
    """Gives adapters peft's names, and puts the rows of matrix B in Hugging Face's order."""

    def __init__(self, to_hf: Callable[[StateDict], StateDict]) -> None:
        self._to_hf = to_hf
        self._orders: dict[tuple[str, int, int], Tensor | None] = {}
        """(layer kind, rows, columns) -> torchtune's row for each row of Hugging Face's weight;
        None: both have the same order."""

    def __call__(self, tensors: StateDict) -> StateDict:
        """Convert adapters; both matrices A and B of each must be given."""
        converted: StateDict = {}
        for name, a in tensors.items():
            path = name.removesuffix(f".{_A}")
            if path == name:
                continue
            b = tensors[f"{path}.{_B}"]
            weight = f"{path}.weight"
            (hf_name,) = self._to_hf({weight: torch.empty(len(b), a.shape[1], device="meta")})
            order = self._order(weight, len(b), a.shape[1])
            converted[_peft_name(hf_name, "lora_A")] = a
            converted[_peft_name(hf_name, "lora_B")] = b if order is None else b[order.to(b.device)]
        return converted

    def _order(self, weight: str, rows: int, columns: int) -> Tensor | None:
        kind = weight.split(".")[-2], rows, columns
        if kind not in self._orders:
            numbers = torch.arange(rows, dtype=torch.int32)
            (moved,) = self._to_hf({weight: numbers[:, None].expand(rows, columns)}).values()
            order = moved[:, 0].long()
            self._orders[kind] = None if torch.equal(order, numbers.long()) else order
        return self._orders[kind]


def merged(tensors: StateDict, scale: float) -> StateDict:
    """Add each adapter to its layer's weight; return the weights by the base model's names."""
    merged_tensors: StateDict = {}
    for name, tensor in tensors.items():
        if is_adapter(name):
            continue
        path = name.removesuffix(".weight")
        if (a := tensors.get(f"{path}.{_A}")) is not None:
            added = tensors[f"{path}.{_B}"].float() @ a.float()
            tensor = (tensor.float() + scale * added).to(tensor.dtype)
        merged_tensors[name] = tensor
    return merged_tensors


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Context manager: turn dropout off, for logprobs that need no gradient."""
    active = [each for each in model.modules() if isinstance(each, nn.Dropout) and each.training]
    for each in active:
        each.eval()
    try:
        yield
    finally:
        for each in active:
            each.train()


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that the optimizer updates."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _peft_name(hf_name: str, matrix: str) -> str:
    return f"{_PEFT_PREFIX}{cast(str, hf_name).removesuffix('weight')}{matrix}.weight"
