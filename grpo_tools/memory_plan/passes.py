"""Runs a model's forward and backward passes on fake tensors, to learn what memory they take."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from torchtune import config, training

from grpo_components.models.hugging_face_policy import base_of, decoder_layers, is_transformers
from grpo_components.models.loading import DTYPES
from grpo_components.models.logprobs import ResponseLogprobs, token_batch
from grpo_components.models.lora import trained_parameters
from grpo_components.models.meshes import Sharding, arrange_ranks
from grpo_components.settings import Settings
from grpo_components.training.sharded_policy import shard_model
from grpo_components.trajectory import TokenSequence
from grpo_tools.memory_plan.live_bytes import LiveBytes, imagined_ranks, imagining

Bytes = dict[str, int]
"""What the memory is for, or the name of a peak -> bytes. Each number grows by the same amount with
each layer of the model."""

_FEW, _MORE = 3, 4
"""Numbers of layers of two small models, from which the bytes of a deep model are extrapolated.
Both are at least 3, because FSDP has up to three gathered layers in memory."""
_CPU = torch.device("cpu")


def training_bytes(
    cfg: Settings,
    build_model: Callable[[], nn.Module],
    sequences: Sequence[TokenSequence],
    has_gradients: bool,
) -> Bytes:
    """Return bytes on rank 0 in a training step: weights, gradients etc., and each phase's peak."""
    sharding = Sharding(
        replicate=cfg.data_parallel_replicate_dim,
        tensor=cfg.tensor_parallel_dim,
        reduce_dtype=cfg.reduce_dtype,
    )

    def run(build_model: Callable[[], nn.Module]) -> Bytes:
        with imagined_ranks(cfg.num_trainers):
            model = shard_model(
                build_model,
                arrange_ranks(cfg.num_trainers, "cpu", sharding),
                sharding,
                cfg.model_type,
                cfg.dtype,
                cfg.enable_activation_checkpointing,
            )
            with imagining() as live:
                return _train(cfg, model.to_empty(device=_CPU), sequences, has_gradients, live)

    return _by_depth(build_model, run)


def inference_bytes(
    cfg: Settings, build_model: Callable[[], nn.Module], sequences: Sequence[TokenSequence]
) -> Bytes:
    """Return the bytes of a forward pass without gradients, with the whole model on one device."""

    def run(build_model: Callable[[], nn.Module]) -> Bytes:
        with imagining() as live, torch.no_grad():
            with training.set_default_dtype(DTYPES[cfg.dtype]):
                model = build_model().requires_grad_(False)
            found = {"weights": live.live}
            steps = _Steps(live, list(decoder_layers(model)), found)
            logprobs = ResponseLogprobs(model, chunk_tokens=cfg.logprob_chunk_tokens)
            batch = token_batch(sequences)
            live.mark()
            _ = logprobs(batch)
            steps.end("logits, forward")
            return found

    return _by_depth(build_model, run)


class _Steps:
    """Records the peak bytes of each part of forward and backward passes."""

    def __init__(self, live: LiveBytes, layers: Sequence[nn.Module], found: Bytes) -> None:
        self._live, self._found = live, found
        layers[-1].register_forward_hook(self._after_last_layer)
        if len(layers) > 1:
            layers[-2].register_forward_hook(
                lambda *args: self._at_gradient(args[-1], "last layer, backward")
            )

    def end(self, part: str) -> None:
        """Record the peak bytes since the last mark, for the part of a pass that has just ended."""
        name = f"peak of {part}"
        self._found[name] = max(self._found.get(name, 0), self._live.mark())

    def _after_last_layer(self, *args: Any) -> None:
        self.end("layers, forward")
        self._at_gradient(args[-1], "logits, backward")

    def _at_gradient(self, output: Tensor, ended: str) -> None:
        if output.requires_grad:
            output.register_hook(lambda _: self.end(ended))


def _train(
    cfg: Settings,
    model: nn.Module,
    sequences: Sequence[TokenSequence],
    has_gradients: bool,
    live: LiveBytes,
) -> Bytes:
    """Train one step as `Trainer` does, and return the bytes of each part."""
    for module in model.modules():
        if hasattr(module, "rope_init"):
            cast(Any, module).rope_init()
    parameters = [cast(Any, parameter) for parameter in trained_parameters(model)]
    shards = [nn.Parameter(parameter.to_local()) for parameter in parameters]
    found = {"weights": live.live}
    optimizer = _optimizer(cfg, shards)
    for shard in shards:
        shard.grad = torch.empty_like(shard)
    optimizer.step()  # makes its state
    optimizer.zero_grad(set_to_none=True)
    found["optimizer"] = live.live - found["weights"]
    steps = _Steps(live, list(decoder_layers(model)), found)
    has_entropy = cfg.loss.get("entropy_coeff", 0) > 0
    logprobs = ResponseLogprobs(
        model, chunk_tokens=cfg.logprob_chunk_tokens, entropy_gradient=has_entropy
    )
    if has_gradients:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
    live.mark()
    before = live.live
    batch = token_batch(sequences)
    values, entropies = logprobs(batch)
    found["activations"] = live.live - before
    steps.end("logits, forward")
    (values.sum() + entropies.sum()).backward()
    del batch, values, entropies
    steps.end("other layers, backward")
    for shard, parameter in zip(shards, parameters, strict=True):
        shard.grad = parameter.grad.to_local()
    found["gradients"] = sum(cast(Tensor, shard.grad).nbytes for shard in shards)
    optimizer.step()
    steps.end("optimizer")
    return found


def _optimizer(cfg: Settings, shards: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Build the config's optimizer with a fixed lr; replace one of torchao by SGD with momentum."""
    node = OmegaConf.create({**cfg.optimizer})
    if OmegaConf.is_dict(node.get("lr")):
        node.lr = 1.0
    if node._component_.startswith("torchao."):  # its step is compiled, which needs memory
        return torch.optim.SGD(shards, momentum=0.9)
    return config.instantiate(node, shards)


def _by_depth(
    build_model: Callable[[], nn.Module], run: Callable[[Callable[[], nn.Module]], Bytes]
) -> Bytes:
    """Extrapolate the bytes of a deep model from runs with few layers, as all layers are alike."""

    def shortened(num_layers: int) -> Callable[[], nn.Module]:
        def build() -> nn.Module:
            model = build_model()
            holder = base_of(model) if is_transformers(model) else cast(Any, model)
            holder.layers = decoder_layers(model)[:num_layers]
            return model

        return build

    with torch.device("meta"):
        num_layers = len(decoder_layers(build_model()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about kernels that a CPU would take, in other dtypes
        if num_layers <= _MORE:
            return run(build_model)
        few, more = (run(shortened(n)) for n in (_FEW, _MORE))
    growth = (num_layers - _FEW) // (_MORE - _FEW)
    return {name: few[name] + growth * (more[name] - few[name]) for name in few}
