"""Swaps LoRA adapters in a vLLM engine between two steps, for new requests and running ones."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest

from grpo_components.exchange.shared_weights import SharedMemory, SharedTensors, open_shared
from grpo_components.models.lora import LoraOptions

_TIMEOUT_S = 300.0
"""Longest wait for all workers to load an adapter, in seconds."""


def adapter_arguments(lora: LoraOptions) -> dict[str, Any]:
    """Return vLLM's arguments for an engine with one adapter at a time."""
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_cpu_loras": 1,
        "max_lora_rank": lora.reserved_rank,
        "lora_target_modules": list(lora.target_modules),  # else vLLM has room in every layer
    }


class Adapters:
    """The adapter of an engine: at most one, under a name and a number that are never used again.

    vLLM keys its prefix cache by an adapter's name. It would keep the KV (keys and values) of an
    adapter that another one of the same name replaces.
    """

    def __init__(self, lora: LoraOptions, executor: Any, *, in_process: bool) -> None:
        self._executor, self._in_process = executor, in_process
        self._described = {
            "r": lora.rank,
            "lora_alpha": lora.alpha,
            "target_modules": list(lora.target_modules),
        }
        self._swaps = 0
        self.current: LoRARequest | None = None
        """The adapter for new requests; None before the first one: the base model."""

    def swap(self, version: int, tensors: Mapping[str, torch.Tensor], scheduler: Any) -> None:
        """Replace the adapter, also for the requests that are running.

        Running requests keep the KV that they have. The caller clears the prefix cache.
        """
        self._swaps += 1
        # A version may come again after a rollback, with other weights; a swap's number may not.
        name = f"policy version {version}, swap {self._swaps}"
        adapter = LoRARequest(name, self._swaps, lora_path="(from memory)")
        install = partial(_install, adapter=adapter, described=self._described)
        if self._in_process:
            self._executor.collective_rpc(install, args=(dict(tensors),))
        else:
            memory = SharedMemory(tensors)
            try:
                self._executor.collective_rpc(install, timeout=_TIMEOUT_S, args=(memory.tensors,))
            finally:
                memory.close()
        for request in scheduler.requests.values():
            request.lora_request = adapter
            request.block_hashes = []  # they are keyed by the adapter
            request.update_block_hashes()
        self.current = adapter


def _install(
    worker: Any,
    tensors: Mapping[str, torch.Tensor] | SharedTensors,
    adapter: LoRARequest,
    described: dict[str, Any],
) -> None:
    """Load an adapter into a worker in place of the one before, and use it for every request."""
    if isinstance(tensors, SharedTensors):
        tensors = open_shared(tensors)
    runner = worker.model_runner
    manager = runner.lora_manager
    slots = manager._adapter_manager
    mapper = getattr(slots.model, "hf_to_vllm_mapper", None)
    model = LoRAModel.from_lora_tensors(
        adapter.lora_int_id,
        {name: tensor.clone() for name, tensor in tensors.items()},  # vLLM scales them in place
        PEFTHelper(**described),
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
        model_vocab_size=manager.vocab_size,
        weights_mapper=mapper and mapper.get_rename_mapper(),
    )
    for number in manager.list_adapters():
        manager.remove_adapter(number)
    slots.add_adapter(model)
    if missing := sorted(model.loras.keys() - slots.modules.keys()):  # vLLM would ignore them
        raise RuntimeError(f"vLLM has no adapter in the layers {', '.join(missing):.200}")
    slots.activate_adapter(adapter.lora_int_id)
    _use_for_all(runner, adapter)


def _use_for_all(runner: Any, adapter: LoRARequest) -> None:
    """Make the requests that a worker has begun go on with an adapter."""
    number = adapter.lora_int_id
    if hasattr(runner, "lora_state"):  # vLLM's second model runner, which CUDA has
        for request_id, index in runner.req_states.req_id_to_index.items():
            runner.lora_state.add_request(request_id, index, adapter)
        return
    batch = runner.input_batch
    for index in batch.req_id_to_index.values():
        batch.request_lora_mapping[index] = number
    running = set(batch.req_id_to_index)
    batch.lora_id_to_request_ids = {number: running} if running else {}
    batch.lora_id_to_lora_request = {number: adapter} if running else {}
    for state in runner.requests.values():
        state.lora_request = adapter
