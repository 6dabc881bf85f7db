"""Builds any of transformers' causal language models as the policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from grpo_components.errors import fail
from grpo_components.models import hugging_face_attention as shared


def hugging_face(path: str) -> nn.Module:
    """Build the causal language model that a folder's config.json describes, without dropout.

    Attention computes each prompt once for all its responses. A tied output head has no parameter
    of its own. The weights are random: the trainer loads the folder's weights later.
    """
    from transformers import AutoModelForCausalLM

    shared.register()
    config = read_config(path)
    try:
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.get_default_dtype(), attn_implementation=shared.NAME
        )
    except Exception as error:  # a class may refuse its config with errors of many types
        cause = " ".join(str(error).split())[:200]
        fail("model.path", f"{path}: {cause}", "the folder of a causal language model")
    return prepared(model)


def read_config(path: str | Path) -> Any:
    """Read the config.json of a folder, without running code from the folder."""
    from transformers import AutoConfig

    if not (Path(path) / "config.json").is_file():
        fail("model.path", f"no file {path}/config.json", "the folder of a Hugging Face model")
    try:
        return AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # bad values in the file cause errors of many types
        cause = " ".join(str(error).split())[:200]
        problem = f"transformers cannot read {path}/config.json: {cause}"
        fail("model.path", problem, "the folder of a Hugging Face model")


def prepared(model: Any) -> nn.Module:
    """Turn a transformers model into a policy: no dropout, and one name for tied weights."""
    decoder_layers(model)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None:
        fail("model", f"{type(model).__name__} has no output head", "a causal language model")
    if head.weight is embedding.weight:
        model.set_output_embeddings(TiedHead(embedding, head.bias))
        model.all_tied_weights_keys = {}  # else transformers would tie the removed name again
    return model.eval()  # all dropout and router noise act in training mode only


def is_transformers(model: nn.Module) -> bool:
    """Whether a model is from transformers, sharded or not: FSDP2 makes a subclass of its class."""
    return any(base.__name__ == "PreTrainedModel" for base in type(model).__mro__)


def folder_of(model: nn.Module) -> Path | None:
    """Return the folder that a transformers model was built from; None for a torchtune decoder."""
    return Path(cast(Any, model).name_or_path) if is_transformers(model) else None


def plain_name(name: str) -> str:
    """Remove what checkpointing and compiling wrappers add to a parameter's or buffer's name."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def base_of(model: nn.Module) -> Any:
    """Return the part of a transformers model that computes the hidden states."""
    return cast(Any, model).base_model


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """Return the decoder layers of a policy, in their order."""
    if not is_transformers(model):
        return cast(Any, model).layers
    for module in base_of(model).children():
        if isinstance(module, nn.ModuleList) and len(module) > 0:
            return module
    problem = f"{type(model).__name__} has no list of decoder layers"
    fail("model", problem, "a decoder of transformers with one, or a decoder of torchtune")


def longest_sequence(model: nn.Module) -> int | None:
    """Return the length in tokens of the longest sequence that a policy supports; None: any."""
    if not is_transformers(model):
        return cast(Any, model).max_seq_len
    config: Any = model.config
    return getattr(config.get_text_config(), "max_position_embeddings", None)


class TiedHead(nn.Module):
    """Projects hidden states to logits with the embedding's weight, without a copy of it."""

    def __init__(self, embedding: nn.Module, bias: nn.Parameter | None) -> None:
        super().__init__()
        self._embedding = (embedding,)  # in a tuple, so that it is no submodule
        self.bias = bias

    @property
    def weight(self) -> Tensor:
        """The embedding's weight, [V, D]."""
        return cast(Any, self._embedding[0]).weight

    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits [..., V] of hidden states [..., D]."""
        return functional.linear(hidden, self.weight, self.bias)


class _BaseOutput:
    """Stands in for the output of a base model: has hidden states; all other fields are None."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, number: int) -> Tensor:
        return (self.last_hidden_state,)[number]


class _WithHidden:
    """Replaces a model in a call of its `forward`: the base model returns given hidden states."""

    def __init__(self, model: Any, hidden: Tensor) -> None:
        self._model = model
        # No method: an object that holds its own method is freed by the garbage collector alone.
        setattr(self, model.base_model_prefix, lambda *_, **__: _BaseOutput(hidden))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def logits_of(model: nn.Module, hidden: Tensor) -> Tensor:
    """Compute a transformers model's logits from hidden states, with the model's scales and caps.

    This runs `forward` of the model's class but skips the base model. So no rule of a model family
    is copied here (Granite's and Cohere's scales, Gemma 2's cap).
    """
    forward: Any = type(model).forward
    rest = _WithHidden(model, hidden[None])
    return forward(rest, inputs_embeds=hidden[None], use_cache=False).logits[0]
