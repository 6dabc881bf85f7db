"""Reads the sizes of a model without allocating its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from grpo_components.models.flops import ModelFlops
from grpo_components.models.hf_weights import layer_groups
from grpo_components.models.hugging_face_policy import decoder_layers, is_transformers
from grpo_components.models.loading import DTYPES
from grpo_components.models.lora import adapted_model, is_adapter, trained_parameters
from grpo_components.settings import LoraSettings


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a policy's model; build it with `ModelSizes.of`."""

    parameters: int
    """Number of parameters without adapters; a tied matrix counts once."""
    trained: int
    """Number of parameters that are trained: all, or those of the adapters."""
    units: tuple[int, ...]
    """Number of parameters of each unit that trainers send to generators: a layer, or another
    tensor."""
    num_layers: int
    dim: int
    """Width of the hidden state."""
    intermediate: int
    """Width of the feed-forward network."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocabulary: int
    flops: ModelFlops

    @classmethod
    def of(
        cls, build_model: Callable[[], nn.Module], lora: LoraSettings | None = None
    ) -> ModelSizes:
        """Build the model on the meta device, and read its sizes."""
        with torch.device("meta"):
            trained = model = cast(Any, build_model())
            if lora is not None:
                trained = adapted_model(build_model, lora, "fp32")
        state = trained.state_dict()
        if lora is not None:
            state = {name: tensor for name, tensor in state.items() if is_adapter(name)}
        return cls(
            parameters=_count(model.parameters()),
            trained=_count(trained_parameters(trained)),
            units=tuple(_count(map(state.__getitem__, names)) for names in layer_groups(state)),
            num_layers=len(decoder_layers(model)),
            flops=ModelFlops.of(trained),
            **(_of_transformers(model) if is_transformers(model) else _of_torchtune(model)),
        )

    def snapshot_bytes(self, dtype: str) -> int:
        """Return the bytes that a push sends to generators: all weights, or the adapters."""
        return sum(self.units) * DTYPES[dtype].itemsize

    def weight_bytes(self, dtype: str) -> int:
        """Return the bytes of the model without adapters."""
        return self.parameters * DTYPES[dtype].itemsize

    def largest_bucket(self, dtype: str, num_ranks: int) -> int:
        """Return the most bytes that one trainer rank sends in a push."""
        shares = [sum(self.units[rank::num_ranks]) for rank in range(num_ranks)]
        return max(shares) * DTYPES[dtype].itemsize

    def kv_bytes_per_token(self, dtype: str, workers: int = 1) -> int:
        """Return the bytes of a token's keys and values in all layers, for one worker of vLLM."""
        heads = max(self.num_kv_heads // workers, 1)
        return 2 * self.num_layers * heads * self.head_dim * DTYPES[dtype].itemsize


def _count(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _of_torchtune(model: Any) -> dict[str, int]:
    attention, (vocabulary, dim) = model.layers[0].attn, model.tok_embeddings.weight.shape
    return {
        "dim": dim,
        "intermediate": model.layers[0].mlp.w1.out_features,
        "num_heads": attention.num_heads,
        "num_kv_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "vocabulary": vocabulary,
    }


def _of_transformers(model: Any) -> dict[str, int]:
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    return {
        "dim": config.hidden_size,
        "intermediate": config.intermediate_size,
        "num_heads": heads,
        "num_kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "vocabulary": config.vocab_size,
    }
