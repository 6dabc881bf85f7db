"""Finds where a torchtune decoder differs from the model that config.json describes."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchtune.modules import TransformerDecoder

from grpo_components.errors import ConfigError
from grpo_components.models.qwen3 import Qwen3Attention

HF_MODEL_TYPES = {
    **dict.fromkeys(("LLAMA2", "LLAMA3", "LLAMA3_2", "MISTRAL"), ("llama", "mistral")),
    "GEMMA": ("gemma",),
    **dict.fromkeys(("PHI3_MINI", "PHI4"), ("phi3",)),
    "QWEN2": ("qwen2",),
    "QWEN3": ("qwen3",),
}
"""torchtune's model family -> `model_type` values in config.json of models with the same layers."""
_IN_HALVES = ("PHI3_MINI", "PHI4", "QWEN2", "QWEN3")  # RoPE pairs dimensions i and i + dim / 2
_POSITIONS = 1024
_ROPE_TOLERANCE = 5e-3  # rounding of float32 angles up to 1024 radians
_BY_LENGTH = ("dynamic", "longrope")  # frequencies depend on the sequence length


@dataclass(frozen=True)
class Difference:
    """One value in which the built model differs from the base model."""

    argument: str
    """Name of the value in torchtune's builders."""
    found: Any
    key: str
    """Name of the value in config.json."""
    expected: Any
    can_match: bool = True
    """Whether torchtune supports the expected value."""


def read_hf_config(base: Path) -> Any:
    """Read a Hugging Face model's config.json; missing keys get the model family's defaults."""
    from transformers import AutoConfig  # imported here: it takes seconds

    try:
        return AutoConfig.from_pretrained(str(base), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # bad values in the file cause errors of many types
        cause = " ".join(str(error).split())[:120]
        raise ConfigError(
            "base_model_path",
            f"transformers cannot read {base / 'config.json'}: {cause}",
            "the folder of a Hugging Face model",
        ) from error


def sliding_window(raw: Mapping[str, Any]) -> int | None:
    """Return the base model's attention window in tokens, which torchtune lacks, or None."""
    if raw.get("model_type") in ("qwen2", "qwen3") and not raw.get("use_sliding_window", False):
        return None
    window = raw.get("sliding_window", 4096 if raw.get("model_type") == "mistral" else None)
    return window or None  # vLLM reads 0 as no window


def differences(model: nn.Module, model_type: str, hf_config: Any) -> Iterator[Difference]:
    """Yield each value in which a decoder differs from a base model's config.

    Values are read from the built modules, so it does not matter whether they came from the run's
    config, a torchtune builder or a default. RoPE, norms, activations and embedding also run on
    test input, which detects a different module with weights of the same shape.
    """
    if not isinstance(model, TransformerDecoder):
        return
    yield from _sizes(model, hf_config, model_type)
    yield from _dropout(model)
    yield from _norms(model, hf_config, model_type)
    yield from _positions(model, hf_config, model_type)
    yield from _activations(model, hf_config, model_type)
    factor = hf_config.hidden_size**0.5 if model_type == "GEMMA" else 1.0
    found = _embedding_factor(model.tok_embeddings)
    if found is not None and not math.isclose(found, factor, rel_tol=1e-4):
        kind = type(model.tok_embeddings).__name__
        yield Difference("tok_embeddings", kind, "model_type", hf_config.model_type)


def _sizes(model: TransformerDecoder, hf_config: Any, model_type: str) -> Iterator[Difference]:
    heads, width = hf_config.num_attention_heads, hf_config.hidden_size
    tied = "output.weight" not in model.state_dict()
    yield from _unequal("num_layers", len(model.layers), "num_hidden_layers", hf_config)
    embedding = model.tok_embeddings
    yield from _unequal("vocab_size", embedding.num_embeddings, "vocab_size", hf_config)
    yield from _unequal("embed_dim", embedding.embedding_dim, "hidden_size", hf_config)
    for layer in model.layers:
        attention, mlp = _part(layer, "attn"), _part(layer, "mlp")
        yield from _unequal("num_heads", attention.num_heads, "num_attention_heads", hf_config)
        kv_heads = attention.num_kv_heads
        yield from _unequal("num_kv_heads", kv_heads, "num_key_value_heads", hf_config)
        head_dim = getattr(hf_config, "head_dim", None) or width // heads
        if attention.head_dim != head_dim:
            yield Difference("head_dim", attention.head_dim, "head_dim", head_dim)
        if model_type == "QWEN3" and not isinstance(attention, Qwen3Attention):
            # torchtune's MultiHeadAttention with the same weights normalizes after RoPE.
            kind = type(attention).__name__
            yield Difference("attn", kind, "model_type", hf_config.model_type)
        if not attention.is_causal:
            yield Difference("is_causal", False, "is_causal", True)
        middle = getattr(getattr(mlp, "w1", None), "out_features", hf_config.intermediate_size)
        yield from _unequal("intermediate_dim", middle, "intermediate_size", hf_config)
    yield from _unequal("tie_word_embeddings", tied, "tie_word_embeddings", hf_config)


def _part(layer: nn.Module, name: str) -> Any:
    return getattr(layer, name)


def _unequal(argument: str, found: Any, key: str, hf_config: Any) -> Iterator[Difference]:
    expected = getattr(hf_config, key)
    if found != expected:
        yield Difference(argument, found, key, expected)


def _dropout(model: nn.Module) -> Iterator[Difference]:
    for module in model.modules():
        for name in ("attn_dropout", "p"):
            share = getattr(module, name, 0.0)
            if (name == "attn_dropout" or isinstance(module, nn.Dropout)) and share:
                yield Difference("attn_dropout", share, "dropout", 0.0)


def _norms(model: nn.Module, hf_config: Any, model_type: str) -> Iterator[Difference]:
    eps = float(hf_config.rms_norm_eps)
    tried: set[type] = set()
    for module in model.modules():
        if not (hasattr(module, "eps") and len(list(module.parameters())) == 1):
            continue
        found: Any = module.eps
        if not math.isclose(found, eps, rel_tol=1e-6):
            yield Difference("norm_eps", found, "rms_norm_eps", eps)
        elif type(module) not in tried:
            tried.add(type(module))
            if not _is_norm(module, eps, offset=1.0 if model_type == "GEMMA" else 0.0):
                kind = type(module).__name__
                yield Difference("norm", kind, "model_type", hf_config.model_type)


def _is_norm(module: nn.Module, eps: float, offset: float) -> bool:
    """Whether a module computes RMSNorm(x) * (weight + offset); x is so small that eps matters."""
    norm = copy.deepcopy(module).to_empty(device="cpu").float()
    (weight,) = norm.parameters()
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        weight.copy_(torch.randn(weight.shape, generator=draw))
        x = torch.randn(4, weight.numel(), generator=draw) * eps**0.5
        expected = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (weight + offset)
        return torch.allclose(norm(x), expected, rtol=1e-3, atol=1e-4)


def _positions(model: TransformerDecoder, hf_config: Any, model_type: str) -> Iterator[Difference]:
    rope = hf_config.rope_parameters
    kind = rope.get("rope_type", "default")
    attentions = [_part(layer, "attn") for layer in model.layers]
    modules = {id(a.pos_embeddings): (a.pos_embeddings, a.head_dim) for a in attentions}
    for module, head_dim in modules.values():
        theta = float(rope["rope_theta"])
        base = getattr(module, "base", theta)
        if not math.isclose(base, theta, rel_tol=1e-9):
            yield Difference("rope_base", base, "rope_theta", theta)
            continue
        if kind in _BY_LENGTH:
            name = type(module).__name__
            yield Difference("rope", name, "rope_scaling", kind, can_match=False)
            continue
        yield from _scaling(module, rope)
        rotated = _rotated(module, head_dim)
        halves = model_type in _IN_HALVES
        if rotated is not None and not torch.allclose(
            rotated, _expected_rotated(hf_config, kind, head_dim, halves), atol=_ROPE_TOLERANCE
        ):
            scale = getattr(module, "scale_factor", None)
            argument, found = ("rope", type(module).__name__)
            if kind == "default" and scale not in (None, 1):
                argument, found = ("scale_factor", scale)
            yield Difference(argument, found, "rope_scaling", "none" if kind == "default" else kind)


_SCALING = {
    "scale_factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "old_context_len": "original_max_position_embeddings",
}
"""Values of Llama 3.1's RoPE scaling: name in torchtune -> name in config.json."""


def _scaling(module: nn.Module, rope: Mapping[str, Any]) -> Iterator[Difference]:
    for name, key in _SCALING.items() if rope.get("rope_type") == "llama3" else ():
        found, expected = getattr(module, name, rope[key]), rope[key]
        if not math.isclose(found, expected):
            yield Difference(name, found, f"rope_scaling.{key}", expected)


def _rotated(module: nn.Module | None, head_dim: int) -> Tensor | None:
    """Return fixed random vectors [1, T, 1, head_dim] after RoPE; None if the module cannot run."""
    x = _vectors(head_dim)
    if module is None:
        return x
    if not (hasattr(module, "rope_init") and hasattr(module, "max_seq_len")):
        return None
    rope: Any = copy.deepcopy(module)
    rope.max_seq_len = _POSITIONS
    with torch.device("cpu"):
        rope.rope_init()
    return rope(x)


def _expected_rotated(hf_config: Any, kind: str, head_dim: int, halves: bool) -> Tensor:
    """Return `_rotated`'s vectors after the base model's RoPE, in torchtune's dimension order."""
    factor = 1.0
    if kind == "default":
        share = hf_config.rope_parameters.get("partial_rotary_factor", 1.0)
        dim = int(head_dim * share)
        places = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        frequencies = 1.0 / (float(hf_config.rope_parameters["rope_theta"]) ** places)
    else:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](hf_config, torch.device("cpu"))
        dim = 2 * len(frequencies)
    x = _vectors(head_dim)
    rotating, rest = x[..., :dim], x[..., dim:]
    a, b = rotating.chunk(2, dim=-1) if halves else (rotating[..., 0::2], rotating[..., 1::2])
    angles = (torch.arange(_POSITIONS).float()[:, None] * frequencies)[None, :, None]
    cos, sin = angles.cos() * factor, angles.sin() * factor
    pair = (a * cos - b * sin, b * cos + a * sin)
    rotated = torch.cat(pair, dim=-1) if halves else torch.stack(pair, dim=-1).flatten(-2)
    return torch.cat([rotated, rest], dim=-1)


def _vectors(head_dim: int) -> Tensor:
    return torch.randn(1, _POSITIONS, 1, head_dim, generator=torch.Generator().manual_seed(0))


def _activations(
    model: TransformerDecoder, hf_config: Any, model_type: str
) -> Iterator[Difference]:
    from transformers.activations import ACT2FN

    key, name = "hidden_act", hf_config.hidden_act
    if model_type == "GEMMA":  # as in vLLM: the first config files had a wrong `hidden_act`
        key = "hidden_activation"
        name = getattr(hf_config, key, None) or "gelu_pytorch_tanh"
    x = torch.linspace(-4, 4, 161)
    activations = {
        id(f): f for f in (getattr(layer.mlp, "activation", None) for layer in model.layers)
    }
    for activation in activations.values():
        if activation is None:
            continue
        if name not in ACT2FN or not torch.allclose(activation(x), ACT2FN[name](x), atol=1e-5):
            yield Difference("activation", type(activation).__name__, key, name)


def _embedding_factor(embedding: nn.Module) -> float | None:
    """Return the factor by which an embedding scales its weights; None if it is no nn.Embedding."""
    if not isinstance(embedding, nn.Embedding):
        return None
    row = copy.copy(embedding)
    row._parameters = {"weight": nn.Parameter(torch.ones(1, embedding.embedding_dim))}
    row.num_embeddings = 1
    with torch.no_grad():
        return float(row(torch.tensor([0]))[0, 0])
