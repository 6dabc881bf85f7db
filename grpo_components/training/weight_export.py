"""Gathers sharded weights layer by layer, and packs the layers that a rank sends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from grpo_components.exchange.weight_deltas import DeltaBucket, DeltaEncoder
from grpo_components.exchange.weights import Bucket, BucketBuffers, Manifest, StateDict
from grpo_components.models.hf_weights import file_converter, layer_groups
from grpo_components.models.hugging_face_policy import plain_name
from grpo_components.models.loading import DTYPES
from grpo_components.models.lora import AdapterNames, engine_scale, is_adapter, merged
from grpo_components.training.trainer_options import TrainerOptions


class WeightExport:
    """Copies a rank's share of the weights (of n ranks: every n-th layer) into a reused buffer.

    A push (of weights to the server) keeps one copy of the share in memory; a push of deltas keeps
    a second one, to compare the next push with. A new buffer is made only if none is free.
    """

    def __init__(
        self,
        model: nn.Module,
        to_hf: Callable[[StateDict], StateDict],
        dtype: torch.dtype,
        device: torch.device,
        rank: int,
        num_ranks: int,
        exported: Callable[[str], bool] = lambda name: True,
        engine_scale: Callable[[str], float] = lambda name: 1.0,
    ) -> None:
        self._model, self._to_hf, self._dtype, self._device = model, to_hf, dtype, device
        self._exported, self._engine_scale = exported, engine_scale
        self._rank, self._num_ranks = rank, num_ranks
        self._buffer_names = {plain_name(name) for name, _ in model.named_buffers()}
        empty = partial(torch.empty, device="meta")
        share = list(self._convert(lambda value, dtype: empty(value.shape, dtype=dtype)))
        share = share[rank::num_ranks]
        nbytes = sum(tensor.nbytes for layer in share for tensor in layer.values())
        self._on_gpu = device.type == "cuda"
        self._buffers = BucketBuffers(nbytes, pinned=self._on_gpu)
        self._copied: dict[int, tuple[Bucket, torch.cuda.Event | None]] = {}
        self._deltas = DeltaEncoder()

    def layers(self) -> Iterator[StateDict]:
        """Gather and yield the layers one by one, by Hugging Face names; collective."""

        def gather(value: Tensor, dtype: torch.dtype) -> Tensor:
            value = value.to(self._device, dtype)  # may be on the CPU
            if isinstance(value, DTensor):  # of one rank alone, a gather would be one more copy
                return value.full_tensor() if value.device_mesh.size() > 1 else value.to_local()
            return value

        return self._convert(gather)

    def copy(self, version: int) -> None:
        """Gather all layers, and keep a copy of this rank's share as `version`; collective."""
        bucket, mine = self._buffers.bucket(), StateDict()
        for number, layer in enumerate(self.layers()):
            if number % self._num_ranks == self._rank:
                mine = layer
            if number % self._num_ranks == self._num_ranks - 1:
                # Now each rank has a layer: they copy side by side, and none waits in a gather.
                self._add(bucket, mine)
                mine = {}
        self._add(bucket, mine)
        done = torch.cuda.Event() if self._on_gpu else None
        if done:
            done.record()
        self._copied[version] = bucket, done

    def bucket(
        self, version: int, base: int | None
    ) -> tuple[tuple[Manifest, NDArray[np.uint8]] | DeltaBucket, Manifest]:
        """Return the share kept by `copy`, or a delta to `base`, and its manifest.

        Any thread may call this.
        """
        copied, done = self._copied.pop(version)
        if done:
            done.synchronize()
        bucket = copied.close()
        if base is None:
            return bucket, bucket[0]
        delta = self._deltas.encode(version, bucket, base)
        return delta, delta.manifest

    def _add(self, bucket: Bucket, tensors: StateDict) -> None:
        for name, tensor in tensors.items():
            bucket.add(name, tensor, self._engine_scale(name))

    def _convert(self, full: Callable[[Tensor, torch.dtype], Tensor]) -> Iterator[StateDict]:
        """Yield each layer by Hugging Face names; `full` makes each value a whole tensor.

        Buffers keep their dtype: in bf16, a router's bias would choose other experts.
        """
        values = self._model.state_dict()
        dtypes = {n: values[n].dtype if n in self._buffer_names else self._dtype for n in values}
        for names in layer_groups(filter(self._exported, values)):
            yield self._to_hf({name: full(values[name], dtypes[name]) for name in names})


def weight_exports(
    policy: nn.Module, options: TrainerOptions, device: torch.device, rank: int
) -> list[WeightExport]:
    """Build the exports that a checkpoint saves; a push sends the first.

    For LoRA, they are the adapter and, with `save_merged`, the merged model.
    """
    to_hf = file_converter(policy, options.model_type, Path(options.base_model_path))

    def export(convert: Callable[[StateDict], StateDict], **which: Any) -> WeightExport:
        dtype, num_ranks = DTYPES[options.dtype], options.num_ranks
        return WeightExport(policy, convert, dtype, device, rank, num_ranks, **which)

    lora = options.lora
    if lora is None:
        return [export(to_hf)]
    scale = partial(engine_scale, lora=lora)
    exports = [export(AdapterNames(to_hf), exported=is_adapter, engine_scale=scale)]
    if lora.save_merged:
        exports.append(export(lambda layer: to_hf(merged(layer, lora.scale))))
    return exports
