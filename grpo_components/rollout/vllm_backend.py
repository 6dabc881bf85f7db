"""Runs vLLM in this process as the engine's backend: batches continuously, caches prefixes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from vllm import LLM, SamplingParams
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.exceptions import VLLMValidationError
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.engine.llm_engine import LLMEngine

from grpo_components.exchange.weight_probe import ProbeReading
from grpo_components.exchange.weights import (
    check_names_and_shapes,
    checkpoint_tensors,
    hash_layers,
    join_shares,
    keeps_values,
    shapes_of,
)
from grpo_components.models.lora import ADAPTER_FILE
from grpo_components.rollout.generator_options import EngineOptions
from grpo_components.rollout.samples import BASE_VERSION, Completion, Request, Result, Watch
from grpo_components.rollout.vllm_weights import (
    ADAPTER,
    adapter_arguments,
    hash_parameters,
    load_into_worker,
    load_into_workers,
    load_random_adapter,
    never_sample_from,
    receive_into_worker,
    swap_adapter,
)
from grpo_components.rollout.weight_receiver import IncomingWeights
from grpo_components.rollout.worker_processes import (
    WORKER_OPTIONS,
    WorkerProcesses,
    remove_names,
    worker_environment,
)
from grpo_components.settings import GeneratorSettings

_SLEEP_LEVELS = {"cuda": 2, "cpu": 0}
"""vLLM's sleep levels: 2 frees weights and KV cache, 0 only pauses the scheduler, because vLLM
cannot free memory on a CPU. Level 1 frees both and keeps a copy of the weights in CPU memory."""


class VLLMBackend:
    """Wraps one vLLM engine; only the thread of `Engine` calls it."""

    def __init__(
        self,
        settings: GeneratorSettings,
        options: EngineOptions,
        seed: int,
        expected_shapes: Mapping[str, tuple[int, ...]],
    ) -> None:
        self._engine = _build(settings, options, seed)
        self._workers: WorkerProcesses | None = None
        if settings.tensor_parallel_size > 1:
            executor = cast(Any, self._core.model_executor)
            self._workers = WorkerProcesses([worker.proc for worker in executor.workers])
            self._engine.collective_rpc(remove_names)
            executor.rpc_broadcast_mq.buffer.is_creator = False  # else vLLM removes the name again
        self._engine.collective_rpc(cast(Any, never_sample_from), args=(options.num_ids,))
        self._label(BASE_VERSION)
        self._lora = lora = options.lora
        self._adapter = None if lora is None else ADAPTER
        level = _SLEEP_LEVELS[options.device]
        self._sleep_level = level if lora is None else min(level, 1)  # no push restores the base
        self._asleep = False
        self._recompute_kv = options.recompute_kv_after_pull
        self._layers: dict[str, int] | None = None
        # vLLM packs or quantizes some layers; with more workers than key heads it has some values
        # twice.
        loaded = checkpoint_tensors(Path(options.model_path), expected_shapes)
        if lora is not None:
            loaded = load_random_adapter(self._engine, lora, expected_shapes)
        dtype = self._engine.model_config.dtype
        self._keeps_values = keeps_values(self._hash, options.device, loaded, dtype)
        if lora is not None:
            adapter = {name: torch.zeros(shape) for name, shape in expected_shapes.items()}
            if options.adapter_path is not None:
                adapter = load_file(Path(options.adapter_path) / ADAPTER_FILE)
                check_names_and_shapes(shapes_of(adapter), expected_shapes)
            swap_adapter(self._engine, lora, adapter)
        self.max_model_len: int = self._engine.model_config.max_model_len
        """Maximum tokens of a prompt and its response together."""
        self._watched: dict[str, tuple[Watch, list[int]]] = {}
        """By request id: function that can end the request, and versions of the tokens so far."""
        self._group: dict[str, Any] | None = None
        """vLLM's description of the communication group over which a trainer sends weights."""

    def add(self, request_id: str, request: Request) -> None:
        """Begin a request; raises a ValueError if it cannot be answered."""
        watch = request.watch
        kind = RequestOutputKind.CUMULATIVE if watch else RequestOutputKind.FINAL_ONLY
        prompt = TokensPrompt(prompt_token_ids=request.prompt_ids)
        try:
            sampling = SamplingParams(
                n=1,
                max_tokens=request.max_tokens,
                temperature=request.temperature,
                seed=request.seed,
                stop_token_ids=list(request.stop_token_ids),
                logprobs=0,
                detokenize=False,
                output_kind=kind,
                **{"top_p": 1.0, "top_k": 0, **request.truncation},
            )
            self._submit(request_id, prompt, sampling, priority=0)
        except VLLMValidationError as error:
            raise ValueError(str(error)) from error
        if watch is not None:
            self._watched[request_id] = watch, []

    def add_probe(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Queue the weight probe (test tokens, see weight_probe.py) ahead of waiting requests."""
        prompt = TokensPrompt(prompt_token_ids=list(token_ids))
        sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False, seed=0)
        # vLLM's default skips its prefix cache here; read it, to find what old weights left there.
        sampling.skip_reading_prefix_cache = False
        self._submit(request_id, prompt, sampling, priority=-1)

    def _submit(
        self, request_id: str, prompt: TokensPrompt, sampling: SamplingParams, priority: int
    ) -> None:
        arrived = float(request_id)  # not the time, so that a replay has the same order
        how: dict[str, Any] = {"arrival_time": arrived, "priority": priority}
        self._engine.add_request(request_id, prompt, sampling, lora_request=self._adapter, **how)

    def step(self) -> list[tuple[str, Result]]:
        """Sample a token for each running request; return (id, result) of all that finished."""
        results: list[tuple[str, Result]] = []
        for output in cast("list[Any]", self._engine.step()):
            request_id, result = output.request_id, None
            if output.finished and output.prompt_logprobs is not None:
                result = probe_reading(output, self._layers)
            elif output.finished:
                result = _finished(output)
            elif request_id in self._watched:
                watch, versions = self._watched[request_id]
                token_ids = output.outputs[0].token_ids
                versions += [self._version] * (len(token_ids) - len(versions))
                if watch(token_ids):
                    result = _completion(output, np.array(versions, np.int32), "stop")
                    self._engine.abort_request([request_id])
            if result is not None:
                self._watched.pop(request_id, None)
                results.append((request_id, result))
        return results

    def finish_batches(self) -> list[tuple[str, Result]]:
        """Take the outputs of the batches that asynchronous scheduling has already started.

        The old weights sampled their tokens, but vLLM labels a token with the weight version at the
        time its output is taken.
        """
        core, results = self._core, list[tuple[str, Result]]()
        if not core.batch_queue:  # None without asynchronous scheduling
            return results
        if core.pause_scheduler("keep", clear_cache=False) is not None:
            raise RuntimeError("vLLM did not pause its scheduler immediately")
        while core.batch_queue:
            results += self.step()
        core.resume_scheduler()
        return results

    def load(self, version: int, weights: Mapping[str, torch.Tensor] | IncomingWeights) -> None:
        """Load weights or an adapter, and wake up; no later request reads KV of the old weights."""
        if self._asleep and self._sleep_level:
            # Before the load: with this memory, vLLM also restores buffers that are not weights.
            self._engine.wake_up(["weights"])
        if self._lora is not None:
            assert not isinstance(weights, IncomingWeights), "preflight refuses it"
            swap_adapter(self._engine, self._lora, weights)
        elif isinstance(weights, IncomingWeights):
            group = None if weights.group == self._group else weights.group
            weights.awaited.set_result(None)
            receive = cast(Any, receive_into_worker)
            self._engine.collective_rpc(receive, args=(group, weights.entries))
            self._group = weights.group
        elif self._workers is None:
            self._engine.collective_rpc(cast(Any, load_into_worker), args=(weights,))
        else:
            load_into_workers(cast(Any, self._core.model_executor), weights)
        if self._asleep:  # only now: the load needs some of the KV cache's memory for itself
            self._engine.wake_up(["kv_cache"] if self._sleep_level else ["scheduling"])
            self._asleep = False
        self._label(version)
        self._layers = self._hash() if self._keeps_values else None
        if not self._recompute_kv:
            empty_prefix_cache(self._core.scheduler)
        elif not self._engine.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM did not reset its KV cache after new weights")

    def abort(self, request_ids: list[str]) -> None:
        """Drop all running requests, whose ids are `request_ids`."""
        self._watched.clear()
        self._engine.abort_request(request_ids)

    def sleep(self) -> None:
        """Free the GPU's memory until the next load; no request is running.

        vLLM measures the GPU's free memory before and after, so no other process may take memory
        meanwhile.
        """
        self._engine.sleep(level=self._sleep_level)
        self._asleep = True

    def failure(self, error: BaseException) -> str:
        """Return how vLLM's worker processes caused an error; empty if they did not."""
        return "" if self._workers is None else self._workers.failure(error)

    def close(self) -> None:
        """End vLLM's workers and free everything."""
        if self._workers is not None:
            # Else vLLM would report the workers' end as a failure.
            cast(Any, self._core.model_executor).shutting_down = True
            self._workers.close()
        # Otherwise garbage collection does it, and takes the process groups of a later engine.
        self._engine.engine_core.shutdown()

    @property
    def _core(self) -> EngineCore:
        return cast(InprocClient, self._engine.engine_core).engine_core

    def _hash(self) -> dict[str, int]:
        of = (self._lora is not None,)
        shares: Any = self._engine.collective_rpc(cast(Any, hash_parameters), args=of)
        return hash_layers(join_shares(shares))

    def _label(self, version: int) -> None:
        """Label tokens with this version from now on."""
        self._engine.set_weight_version(str(version))
        self._version = version


def _build(settings: GeneratorSettings, options: EngineOptions, seed: int) -> LLMEngine:
    # On a CPU a prompt read in two steps would end the engine: vLLM discards the first step's
    # sample by rewinding the random generator, and a CPU generator cannot be rewound.
    num_workers = settings.tensor_parallel_size
    more: dict[str, Any] = {
        "enforce_eager": True,
        "enable_chunked_prefill": False,
        # Only whole blocks of a prompt are shared by its group; the default of 128 is too long.
        "block_size": 32,
    }
    if options.device == "cuda":
        more = {
            "enforce_eager": settings.enforce_eager,
            "gpu_memory_utilization": settings.gpu_memory_utilization,
        }
    if options.colocate and _SLEEP_LEVELS[options.device]:
        more["enable_sleep_mode"] = True
    if options.lora is not None:
        more |= adapter_arguments(options.lora)
    if settings.kv_cache_gib is not None:
        more["kv_cache_memory_bytes"] = int(settings.kv_cache_gib * 2**30) // num_workers
    if options.weight_transfer is not None:
        more["weight_transfer_config"] = WeightTransferConfig(backend=options.weight_transfer)
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # else it would replace `kv_cache_gib`
    environment = contextlib.nullcontext()
    if num_workers > 1:
        more |= {"tensor_parallel_size": num_workers, **WORKER_OPTIONS}
        environment = worker_environment(max(1, torch.get_num_threads() // num_workers))
    with environment:
        return LLM(
            options.model_path,
            skip_tokenizer_init=True,
            dtype=cast(Any, {"fp32": "float32", "bf16": "bfloat16"}[options.dtype]),
            max_model_len=settings.max_model_len,
            max_num_seqs=settings.max_num_seqs,
            logprobs_mode="processed_logprobs",
            scheduling_policy="priority",
            disable_log_stats=True,
            seed=seed,
            **more,
        ).llm_engine


def empty_prefix_cache(scheduler: Any) -> None:
    """Make every cached block unreachable for new requests, even while requests are running.

    Running requests keep the blocks they hold. vLLM's own `reset_prefix_cache` does nothing while
    any request holds a block, unless it preempts all requests.

    New blocks of a running request attend to its old KV (keys and values), so no other request may
    share them. They are therefore cached under a salt that is unique to the request: `cache_salt`
    enters the hash of a request's first block, and the hash of each block enters that of the next.
    A request that has computed nothing yet needs no salt, because all its KV will come from the new
    weights.

    vLLM's public `cache_salt` is fixed when a request is added. So each load would need a new salt
    (not the version, which can repeat), and would have to abort the requests without a token and
    add them again. No public call tells which these are: with `FINAL_ONLY`, a request has no output
    before its end. Outputs at every step would tell, for about 10 us per request and step.
    """
    manager = scheduler.kv_cache_manager
    pool = manager.block_pool
    manager.evict_blocks({block.block_id for block in pool.blocks if block.block_hash is not None})
    if still_cached := len(pool.cached_block_hash_to_block):
        raise RuntimeError(f"vLLM's prefix cache still has {still_cached} blocks of old weights")
    for request in scheduler.requests.values():
        if request.num_computed_tokens:
            request.cache_salt = request.request_id
            request.block_hashes = []
            request.update_block_hashes()


def probe_reading(output: Any, layers: Mapping[str, int] | None) -> ProbeReading:
    """Read logprobs and version of the weight probe from vLLM's output."""
    (label,) = {int(span.version) for span in output.outputs[0].weight_versions}
    if cached := output.num_cached_tokens:  # vLLM has computed no logprobs of these
        return ProbeReading((), label, cached, layers)
    pairs = zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
    return ProbeReading([found[token].logprob for found, token in pairs], label, 0, layers)


def _finished(output: Any) -> Completion:
    """Convert vLLM's last output of a request."""
    found = output.outputs[0]
    versions = np.full(len(found.token_ids), -1, dtype=np.int32)
    for span in found.weight_versions:
        versions[span.start : span.end] = int(span.version)
    return _completion(output, versions, found.finish_reason)


def _completion(output: Any, versions: NDArray[np.int32], finish_reason: Any) -> Completion:
    found = output.outputs[0]
    token_ids = np.asarray(found.token_ids, dtype=np.int64)
    logprobs = [
        entry[token].logprob
        for entry, token in zip(found.logprobs, token_ids.tolist(), strict=True)
    ]
    cached = output.num_cached_tokens or 0
    return Completion(
        token_ids, np.array(logprobs, dtype=np.float32), versions, finish_reason, cached
    )
