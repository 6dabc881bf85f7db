"""vLLM in this process: continuous batching, and weight swaps between two engine steps."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file
from vllm import LLM, SamplingParams
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.exceptions import VLLMValidationError
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.engine.llm_engine import LLMEngine

from grpo_components.exchange.weight_probe import PROBE_IDS, ProbeReading
from grpo_components.exchange.weights import check_names_and_shapes, shapes_of
from grpo_components.models.lora import ADAPTER_FILE, pushed_shapes
from grpo_components.rollout.completions import (
    Completion,
    Watch,
    WatchedRequest,
    finished_completion,
)
from grpo_components.rollout.engine_sleep import EngineAsleepError, EngineSleep, sleep_arguments
from grpo_components.rollout.engine_use import EngineUse
from grpo_components.rollout.generator_options import EngineOptions
from grpo_components.rollout.schedule import STOP, Schedule
from grpo_components.rollout.vllm_weights import (
    ADAPTER,
    adapter_arguments,
    load_into_worker,
    load_into_workers,
    never_sample_from,
    swap_adapter,
)
from grpo_components.rollout.weight_receiver import IncomingWeights, TransferCancelledError
from grpo_components.rollout.worker_processes import (
    WORKER_OPTIONS,
    WorkerProcesses,
    remove_names,
    worker_environment,
)
from grpo_components.settings import GeneratorSettings

BASE_VERSION = 0
"""Policy version of the weights that the engine loads first."""


class EngineStoppedError(RuntimeError):
    """The engine thread has ended; submitted requests get no answer."""


class VLLMEngine:
    """Runs one vLLM engine in a thread of its own, for requests from any thread.

    All requests share one batch. New weights are loaded between two engine steps:
    running requests continue across the swap, and every token has an exact version.
    """

    def __init__(
        self,
        settings: GeneratorSettings,
        options: EngineOptions,
        *,
        seed: int,
        schedule: Schedule[tuple[str, Any, Future[Any]]] | None = None,
    ) -> None:
        self._engine = _build(settings, options, seed)
        self._workers: WorkerProcesses | None = None
        if settings.tensor_parallel_size > 1:
            executor = cast(Any, self._core.model_executor)
            self._workers = WorkerProcesses([worker.proc for worker in executor.workers])
            self._engine.collective_rpc(remove_names)
            executor.rpc_broadcast_mq.buffer.is_creator = False  # else vLLM removes the name again
        self._engine.collective_rpc(cast(Any, never_sample_from), args=(options.num_ids,))
        self._engine.set_weight_version(str(BASE_VERSION))
        self.use = EngineUse(settings.max_num_seqs)
        """What the thread spends its time on."""
        self._lora = lora = options.lora
        self._adapter = None if lora is None else ADAPTER
        self._sleep = EngineSleep(self._engine, options.device, keeps_weights=lora is not None)
        self._recompute_kv = options.recompute_kv_after_pull
        self._expected_shapes = pushed_shapes(Path(options.model_path), lora)
        if lora is not None:
            adapter = {name: torch.zeros(shape) for name, shape in self._expected_shapes.items()}
            if options.adapter_path is not None:
                adapter = load_file(Path(options.adapter_path) / ADAPTER_FILE)
                check_names_and_shapes(shapes_of(adapter), self._expected_shapes)
            swap_adapter(self._engine, lora, adapter)
        self._schedule = Schedule() if schedule is None else schedule
        self._step, self._version = 0, BASE_VERSION
        self._longest: int = self._engine.model_config.max_model_len
        self._running: dict[str, Future[Any]] = {}
        self._watched: dict[str, WatchedRequest] = {}
        self._ids = map(str, range(2**63))
        self._probe: Future[Any] | None = None
        self._entered_prompts = self._entered_tokens = 0
        """Requests, and tokens of their prompts, that entered since the last step."""
        self._dead: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="vllm-engine", daemon=True)
        self._thread.start()

    def submit(
        self,
        prompt_ids: Sequence[int],
        *,
        max_tokens: int,
        temperature: float,
        seed: int,
        stop_token_ids: Sequence[int],
        truncation: Mapping[str, float] | None = None,
        name: str = "a request",
        watch: Watch | None = None,
    ) -> Future[Completion]:
        """Queue one request. Any thread may call this."""
        sampling = SamplingParams(
            n=1,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            stop_token_ids=list(stop_token_ids),
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.CUMULATIVE if watch else RequestOutputKind.FINAL_ONLY,
            **{"top_p": 1.0, "top_k": 0, **(truncation or {})},
        )
        return self._command(name, "request", (list(prompt_ids), sampling, watch))

    def sleep(self) -> Future[int]:
        """Abort what runs, and free GPU memory until `load_weights`. Any thread may call this."""
        return self._command("sleep", "sleep", None)

    def load_weights(self, version: int, tensors: Mapping[str, torch.Tensor]) -> Future[Any]:
        """Swap weights between two steps, wake a sleeping engine, and read the weight probe."""
        check_names_and_shapes(shapes_of(tensors), self._expected_shapes)
        return self._command(f"weights {version}", "weights", (version, tensors))

    def receive_weights(self, version: int, weights: IncomingWeights) -> Future[Any]:
        """Swap the weights between two steps, while they arrive; as `load_weights` otherwise."""
        check_names_and_shapes(weights.shapes, self._expected_shapes)
        return self._command(f"weights {version}", "weights", (version, weights))

    def close(self) -> None:
        """Stop the thread and free the engine; running requests get an EngineStoppedError."""
        with contextlib.suppress(EngineStoppedError):  # it has ended already
            self._command(STOP, STOP, None).result()
        self._thread.join()
        self._schedule.close()

    @property
    def _core(self) -> EngineCore:
        return cast(InprocClient, self._engine.engine_core).engine_core

    def _command(self, name: str, kind: str, payload: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if self._dead is not None:
            future.set_exception(EngineStoppedError(f"the vLLM engine stopped: {self._dead!r}"))
            return future
        self._schedule.put(name, (kind, payload, future))
        return future

    def _run(self) -> None:
        """Run the engine thread: repeatedly take the commands that are due, then make a step."""
        # OpenMP keeps this number per thread, and vLLM's kernels do not ask torch for it.
        torch.set_num_threads(torch.get_num_threads())
        waiting: Future[Any] | None = None
        try:
            while True:
                while command := self._take():
                    kind, payload, waiting = command
                    if kind == STOP:
                        self._dead = EngineStoppedError("closed")
                        waiting.set_result(None)
                        return
                    if kind == "weights":
                        try:
                            self._swap_weights(*payload)
                            self._add_probe(waiting)
                        except TransferCancelledError as error:
                            waiting.set_exception(error)
                    elif kind == "sleep":
                        waiting.set_result(self._fall_asleep())
                    else:
                        prompt_ids, sampling, watch = payload
                        self._add_request(prompt_ids, sampling, watch, waiting)
                    waiting = None
                self._step += 1
                with self.use.step(self._entered_prompts, self._entered_tokens):
                    self._step_engine()
                self._entered_prompts = self._entered_tokens = 0
        except BaseException as error:  # the thread ends: every waiter must be notified
            self._dead = error
            if self._workers is not None and (failure := self._workers.failure(error)):
                self._dead = EngineStoppedError(failure)
            if waiting is not None:
                waiting.set_exception(self._dead)
            raise
        finally:
            self._fail_all()
            if self._workers is not None:
                # Else vLLM would report the workers' end as a failure.
                cast(Any, self._core.model_executor).shutting_down = True
                self._workers.close()
            # Otherwise garbage collection does it, and takes the process groups of a later engine.
            self._engine.engine_core.shutdown()

    def _take(self) -> tuple[str, Any, Future[Any]] | None:
        idle = not self._running
        self.use.begin("idle" if idle else "sampling", len(self._running))
        return self._schedule.take(self._step, idle=idle)

    def _add_request(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        watch: Watch | None,
        future: Future[Completion],
    ) -> None:
        if self._sleep.asleep:
            error = EngineAsleepError("the engine sleeps until it gets weights")
            return future.set_exception(error)
        request_id = next(self._ids)
        try:
            prompt, lora = TokensPrompt(prompt_token_ids=prompt_ids), self._adapter
            self._engine.add_request(request_id, prompt, sampling, lora_request=lora)
        except (ValueError, VLLMValidationError) as error:  # e.g. a prompt that is too long
            return future.set_exception(error)
        self._running[request_id] = future
        if watch is not None:
            self._watched[request_id] = WatchedRequest(watch)
        self._entered_prompts += 1
        self._entered_tokens += len(prompt_ids)

    def _add_probe(self, future: Future[Any]) -> None:
        if not (tokens := min(self._schedule.probe_tokens, self._longest - 1)):
            return future.set_result(None)
        request_id, scheduler = next(self._ids), self._core.scheduler
        add_probe(self._engine, scheduler, request_id, tokens, self._adapter)
        self._running[request_id] = self._probe = future

    def _step_engine(self) -> None:
        for output in cast("list[Any]", self._engine.step()):
            request_id, completion = output.request_id, None
            if output.finished and output.prompt_logprobs is not None:
                self._running.pop(request_id).set_result(probe_reading(output))
            elif output.finished:
                completion = finished_completion(output)
            elif watched := self._watched.get(request_id):
                completion = watched.follow(output, self._version)
                if completion is not None:
                    self._engine.abort_request([request_id])
            if completion is not None:
                self._watched.pop(request_id, None)
                self._running.pop(request_id).set_result(completion)

    def _swap_weights(
        self, version: int, tensors: Mapping[str, torch.Tensor] | IncomingWeights
    ) -> None:
        self.use.begin("loading weights", len(self._running))
        while self._probe is not None and not self._probe.done():
            self._step_engine()  # else it would read these weights in the place of its own
        self._finish_batches_in_flight(core := self._core)
        with self._sleep.woken():
            if self._lora is not None:
                assert not isinstance(tensors, IncomingWeights), "preflight refuses it"
                swap_adapter(self._engine, self._lora, tensors)
            elif isinstance(tensors, IncomingWeights):
                tensors.receive(cast(Any, core.model_executor).collective_rpc)
            elif self._workers is None:
                self._engine.collective_rpc(cast(Any, load_into_worker), args=(tensors,))
            else:
                load_into_workers(core.model_executor, tensors)
        self._engine.set_weight_version(str(version))
        self._version = version
        if not self._recompute_kv:
            empty_prefix_cache(core.scheduler)
        elif not self._engine.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM did not reset its KV cache after new weights")

    def _fall_asleep(self) -> int:
        if self._sleep.asleep:
            return 0
        self._finish_batches_in_flight(self._core)
        # Nobody waits for these: their environment failed, or their attempt was rolled back.
        aborted, self._running = self._running, {}
        self._watched.clear()
        self._engine.abort_request(list(aborted))
        for future in aborted.values():
            future.set_exception(EngineAsleepError("the engine fell asleep"))
        self._sleep.begin()
        return len(aborted)

    def _finish_batches_in_flight(self, core: EngineCore) -> None:
        """Take the outputs of the batches that asynchronous scheduling has already started.

        The old weights sampled their tokens, but vLLM labels a token with the weight version at the
        time its output is taken.
        """
        if not core.batch_queue:  # None without asynchronous scheduling
            return
        if core.pause_scheduler("keep", clear_cache=False) is not None:
            raise RuntimeError("vLLM did not pause its scheduler immediately")
        while core.batch_queue:
            self._step_engine()
        core.resume_scheduler()

    def _fail_all(self) -> None:
        error = EngineStoppedError(f"the vLLM engine stopped: {self._dead!r}")
        for future in self._running.values():
            future.set_exception(error)
        self._running.clear()
        for _, _, future in self._schedule.drain():
            future.set_exception(error)


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
    if options.colocate:
        more |= sleep_arguments(options.device)
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


def add_probe(
    engine: LLMEngine, scheduler: Any, request_id: str, max_tokens: int, lora: Any
) -> None:
    """Add the probe before all requests that wait: a pull waits for it."""
    prompt = TokensPrompt(prompt_token_ids=list(PROBE_IDS[:max_tokens]))
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False, seed=0)
    # vLLM takes such a request past its prefix cache; but what is cached now is of old weights.
    sampling.skip_reading_prefix_cache = False
    engine.add_request(request_id, prompt, sampling, lora_request=lora)
    request = scheduler.requests[next(reversed(scheduler.requests))]
    scheduler.waiting.remove_request(request)
    scheduler.waiting.prepend_request(request)


def probe_reading(output: Any) -> ProbeReading:
    """Return what the engine computed of the probe."""
    (label,) = {int(span.version) for span in output.outputs[0].weight_versions}
    if cached := output.num_cached_tokens:  # vLLM has computed no logprobs of these
        return ProbeReading((), label, cached)
    pairs = zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
    return ProbeReading([found[token].logprob for found, token in pairs], label, 0)
