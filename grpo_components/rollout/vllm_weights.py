"""Loads new weights into vLLM's workers, each of which runs a part of the model."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from vllm.config import set_current_vllm_config
from vllm.lora.request import LoRARequest
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import (
    _layerwise_process,  # pyright: ignore[reportPrivateUsage]
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.meta import materialize_layer
from vllm.v1.engine.llm_engine import LLMEngine

from grpo_components.exchange.shared_weights import (
    SharedMemory,
    SharedTensors,
    open_shared,
    split,
)
from grpo_components.exchange.weights import TensorEntry, hash_named
from grpo_components.models.lora import ADAPTER_FILE, engine_scale, peft_config, reserved_rank
from grpo_components.rollout.weight_receiver import CheckedModel
from grpo_components.settings import LoraSettings

_PART_BYTES = 256 * 2**20
"""Maximum bytes copied into shared memory at once, unless one tensor has more."""
_PARTS_AT_ONCE = 2
"""Parts in shared memory at once: the workers load one while the next is copied."""
_WRITTEN_DIRECTLY = {"GptOssRoutedExperts", "OAIAttention"}
"""Layers that vLLM's models fill without weight loaders; its reload misses them."""
_TIMEOUT_S = 300.0
"""Longest wait for all workers to load a part, in seconds."""


def never_sample_from(worker: Any, num_ids: int | None) -> None:
    """Ban token ids >= `num_ids` (None: no ban) in a worker; vLLM lets a request ban only 1024."""
    model = worker.model_runner.get_model()
    logits_of = model.compute_logits

    def compute_logits(*args: Any, **kwargs: Any) -> torch.Tensor | None:
        logits = logits_of(*args, **kwargs)
        if logits is not None:  # perhaps only one of the workers has them
            logits[..., num_ids:] = -torch.inf
        return logits

    if num_ids is not None:
        model.compute_logits = compute_logits


def load_into_worker(worker: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Replace the weights of the one worker of an engine, which runs in this process."""
    missing = _begin(worker)
    missing -= _load_part(worker, tensors)
    _finish(worker)
    _refuse_missing(missing)


def receive_into_worker(
    worker: Any, group: dict[str, Any] | None, entries: Mapping[str, TensorEntry]
) -> None:
    """Replace the weights of a worker with weights that a trainer sends.

    If a communication `group` is given, the worker first leaves its former group, and joins the
    given one.
    """
    if group is not None:
        worker.shutdown_weight_transfer_engine()
        worker.init_weight_transfer_engine(group)
    missing = _begin(worker)
    engine = worker.weight_transfer_engine
    checked = CheckedModel(engine.model, entries)
    engine.set_weight_update_target(checked, engine.model_config)
    with set_current_vllm_config(worker.vllm_config):
        engine.update_weights(
            {
                "names": list(entries),
                "dtype_names": [entry.dtype for entry in entries.values()],
                "shapes": [list(entry.shape) for entry in entries.values()],
            }
        )
    engine.reset_weight_update_target()
    missing -= checked.loaded
    _finish(worker)
    _refuse_missing(missing)


def _refuse_missing(missing: set[str], worker: str = "vLLM") -> None:
    if missing:
        names = ", ".join(sorted(missing))
        raise RuntimeError(f"{worker} did not load the parameters {names:.200}")


def load_into_workers(executor: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Replace the weights of all workers of an engine, which are processes of their own.

    The tensors pass through shared memory part by part, and each worker copies its share of them.
    So nothing holds a second copy of the model.
    """
    call = partial(executor.collective_rpc, timeout=_TIMEOUT_S, non_block=True)
    missing: list[set[str]] = call(_begin).result()
    in_flight: deque[tuple[SharedMemory, Any]] = deque()

    def collect() -> None:
        memory, loading = in_flight[0]
        for left, loaded in zip(missing, loading.result(), strict=True):
            left -= loaded
        memory.close()
        in_flight.popleft()

    try:
        for part in split(tensors, _PART_BYTES):
            if len(in_flight) == _PARTS_AT_ONCE:
                collect()
            memory = SharedMemory(part)
            in_flight.append((memory, call(_load_part, args=(memory.tensors,))))
        while in_flight:
            collect()
    finally:
        for memory, _ in in_flight:
            memory.close()
    call(_finish).result()
    for number, left in enumerate(missing):
        _refuse_missing(left, f"vLLM's worker {number}")


def hash_parameters(worker: Any, of_adapter: bool) -> dict[str, int]:
    """Hash each parameter of a worker's share of the model or, if `of_adapter`, of the adapter."""
    model = worker.model_runner.get_model()
    if not of_adapter:
        return hash_named(model.named_parameters())
    return hash_named(
        (f"{path}.{kind}.{number}", matrix)
        for path, module in model.named_modules()
        for kind in ("lora_a_stacked", "lora_b_stacked")
        for number, matrix in enumerate(getattr(module, kind, ()))
    )


def _begin(worker: Any) -> set[str]:
    """Prepare all layers for new weights, also what vLLM's reload omits; return parameter names."""
    with _loading(worker) as model:
        parameters = {name for name, _ in model.named_parameters()}
        if worker.device.type == "cpu":
            for module in model.modules():  # else vLLM packs experts only at the first load
                method: Any = getattr(module, "quant_method", None)
                if getattr(method, "moe_kernel", None) is not None:
                    method.moe_kernel = None
        initialize_layerwise_reload(model)
        for module in _written_directly(model):
            materialize_layer(module, get_layerwise_info(module))
    return parameters


def _load_part(worker: Any, tensors: Mapping[str, torch.Tensor] | SharedTensors) -> set[str]:
    """Load some tensors; return the names of the parameters that got them.

    vLLM keeps views of a layer's tensors until it has all of them.
    """
    if isinstance(tensors, SharedTensors):
        tensors = open_shared(tensors)
    with _loading(worker) as model:
        return model.load_weights(iter(tensors.items()))


def _finish(worker: Any) -> None:
    """Put a worker's loaded weights into use, also in the layers that vLLM's reload omits."""
    with _loading(worker) as model:
        for module in _written_directly(model):
            _layerwise_process(module, get_layerwise_info(module))
        if missed := _missed(model):
            raise RuntimeError(f"vLLM's reload does not see the parameters {missed:.200}")
        finalize_layerwise_reload(model, worker.model_runner.model_config)
        _repack_tied_head(model)


def _written_directly(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [module for module in model.modules() if type(module).__name__ in _WRITTEN_DIRECTLY]


def _missed(model: torch.nn.Module) -> str:
    """Return the names of parameters for which nothing was loaded, except a tied head's.

    The config does not tell whether a head is tied: if a checkpoint stores a copy of the embedding
    as the head, vLLM calls the head untied, and lets both share one tensor.
    """
    loaded: set[int] = set()
    unloaded: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        info = get_layerwise_info(module)
        tensors = dict(module.named_parameters(recurse=False))
        if info.kernel_tensors is not None:  # the engine's tensors, which the new ones replace
            tensors = info.kernel_tensors[0]
        if info.can_load() and info.load_numel <= 0:
            unloaded |= {f"{path}.{name}": tensor for name, tensor in tensors.items()}
        else:
            loaded |= {id(tensor) for tensor in tensors.values()}
    return ", ".join(name for name, tensor in unloaded.items() if id(tensor) not in loaded)


@contextlib.contextmanager
def _loading(worker: Any) -> Iterator[Any]:
    """Context manager: set the globals that vLLM's weight loaders read; yields the model."""
    runner = worker.model_runner
    on_device = torch.device(worker.device)
    if worker.device.type == "cpu":
        on_device = contextlib.nullcontext()  # the default; as a context it slows down every call
    with set_current_vllm_config(runner.vllm_config), on_device:
        yield runner.get_model()


def _repack_tied_head(model: torch.nn.Module) -> None:
    """Repack the CPU copy of a tied head; vLLM's reload skips it and would keep the old head."""
    for module in model.modules():
        weight = getattr(module, "weight", None)
        has_matrix = isinstance(weight, torch.Tensor) and weight.ndim == 2 and weight.numel()
        if has_matrix and hasattr(module, "cpu_linear"):
            cast(Any, module).quant_method.process_weights_after_loading(module)


ADAPTER = LoRARequest("policy", 1, lora_path="(it is loaded)")
"""The LoRA adapter of every request. Its name never changes: running requests continue with new
values. The caller must empty the prefix cache, which vLLM keys by the name."""


def adapter_arguments(lora: LoraSettings) -> dict[str, Any]:
    """Return vLLM's arguments for an engine with one LoRA adapter."""
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_cpu_loras": 1,
        "max_lora_rank": reserved_rank(lora),
        "lora_target_modules": list(lora.target_modules),  # else vLLM has room in every layer
    }


def swap_adapter(
    engine: LLMEngine, lora: LoraSettings, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Replace the adapter of all requests; tensors are on the CPU, by peft's names."""
    with tempfile.TemporaryDirectory(prefix="grpo-adapter-") as folder:
        # Copies: a file cannot hold the views of one buffer that a pull gives.
        save_file({n: t.clone() for n, t in tensors.items()}, Path(folder, ADAPTER_FILE))
        Path(folder, "adapter_config.json").write_text(json.dumps(peft_config(lora, "")))
        name, number = ADAPTER.lora_name, ADAPTER.lora_int_id
        if not engine.add_lora(LoRARequest(name, number, folder, load_inplace=True)):
            raise RuntimeError("vLLM did not load the adapter")


def load_random_adapter(
    engine: LLMEngine, lora: LoraSettings, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Load a random adapter, to test if vLLM keeps its values; yield the matrices to expect."""
    random, dtype = torch.Generator().manual_seed(0), engine.model_config.dtype
    made = {name: torch.randn(shape, generator=random).to(dtype) for name, shape in shapes.items()}
    swap_adapter(engine, lora, made)
    yield from ((name, matrix * engine_scale(name, lora)) for name, matrix in made.items())
