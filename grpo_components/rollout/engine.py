"""The engine: samples answers to requests, and loads new weights between two sampling steps."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from grpo_components.exchange.weight_probe import PROBE_IDS
from grpo_components.exchange.weights import check_names_and_shapes, shapes_of
from grpo_components.models.lora import pushed_shapes
from grpo_components.rollout.engine_use import EngineUse
from grpo_components.rollout.generator_options import EngineOptions
from grpo_components.rollout.samples import (
    Completion,
    Request,
    Result,
    Sample,
    Watch,
    sampling_seed,
)
from grpo_components.rollout.schedule import STOP, Schedule
from grpo_components.rollout.weight_receiver import IncomingWeights
from grpo_components.settings import GeneratorSettings

if TYPE_CHECKING:
    from grpo_components.rollout.transformers_backend import TransformersBackend
    from grpo_components.rollout.vllm_backend import VLLMBackend

    Backend = VLLMBackend | TransformersBackend


class EngineStoppedError(RuntimeError):
    """The engine thread has ended; submitted requests get no answer."""


class EngineAsleepError(RuntimeError):
    """The engine sleeps; requests that were running, or arrived since, get no answer."""


def open_engine(
    settings: GeneratorSettings,
    options: EngineOptions,
    *,
    seed: int,
    schedule: Schedule[Any] | None = None,
) -> Engine:
    """Start an engine with the backend that the settings name."""
    assert settings.backend is not None, "the config fills it in"
    if settings.backend == "vllm":
        from grpo_components.rollout.vllm_backend import VLLMBackend as Library
    else:
        from grpo_components.rollout.transformers_backend import TransformersBackend as Library
    shapes = pushed_shapes(Path(options.model_path), options.lora)
    build = partial(Library, settings, options, seed, shapes)
    return Engine(build, shapes, settings.max_num_seqs, schedule)


class Engine:
    """Runs a backend in a thread of its own, and answers requests from any thread.

    All requests share one batch. New weights are loaded between two steps. Running requests
    continue, and each token is labelled with the policy version that sampled it.
    """

    def __init__(
        self,
        build: Callable[[], Backend],
        expected_shapes: Mapping[str, tuple[int, ...]],
        max_num_seqs: int,
        schedule: Schedule[tuple[str, Any, Future[Any]]] | None = None,
    ) -> None:
        self._expected_shapes = expected_shapes
        self.use = EngineUse(max_num_seqs)
        """Measures what the thread spends its time on."""
        self._schedule = Schedule() if schedule is None else schedule
        self._step = 0
        self._running: dict[str, Future[Any]] = {}
        self._ids = map(str, range(2**63))
        self._probe: Future[Any] | None = None
        self._entered_prompts = self._entered_tokens = 0
        """Requests added to the batch since the last engine step, and their prompt tokens."""
        self._asleep = False
        self._dead: BaseException | None = None
        built: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(build, built), name="engine")
        self._thread.daemon = True
        self._thread.start()
        built.result()

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
        """Queue one request; return the future of its completion. Any thread may call this."""
        asked = (max_tokens, temperature, seed, stop_token_ids, truncation or {}, watch)
        return self._command(name, "request", Request(list(prompt_ids), *asked))

    def sleep(self) -> Future[int]:
        """Abort all requests, and free GPU memory until `load_weights`; any thread may call it."""
        return self._command("sleep", "sleep", None)

    def load_weights(
        self, version: int, weights: Mapping[str, torch.Tensor] | IncomingWeights
    ) -> Future[Any]:
        """Load weights, wake the engine, and compute the weight probe (logprobs of test tokens)."""
        is_coming = isinstance(weights, IncomingWeights)
        shapes = weights.shapes if is_coming else shapes_of(weights)
        check_names_and_shapes(shapes, self._expected_shapes)
        return self._command(f"weights {version}", "weights", (version, weights))

    def close(self) -> None:
        """Stop the thread and free the engine; running requests get an EngineStoppedError."""
        with contextlib.suppress(EngineStoppedError):  # it has ended already
            self._command(STOP, STOP, None).result()
        self._thread.join()
        self._schedule.close()

    def _command(self, name: str, kind: str, payload: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if self._dead is not None:
            future.set_exception(EngineStoppedError(f"the engine stopped: {self._dead!r}"))
            return future
        self._schedule.put(name, (kind, payload, future))
        return future

    def _run(self, build: Callable[[], Backend], built: Future[None]) -> None:
        """Run the engine thread: repeatedly take the commands that are due, then make a step."""
        # OpenMP keeps this number per thread, and vLLM's kernels do not ask torch for it.
        torch.set_num_threads(torch.get_num_threads())
        try:
            self._backend = build()
        except BaseException as error:
            return built.set_exception(error)
        built.set_result(None)
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
                        self._swap_weights(*payload)
                        self._add_probe(waiting)
                    elif kind == "sleep":
                        waiting.set_result(self._fall_asleep())
                    else:
                        self._add_request(payload, waiting)
                    waiting = None
                self._step += 1
                with self.use.step(self._entered_prompts, self._entered_tokens):
                    self._answer(self._backend.step())
                self._entered_prompts = self._entered_tokens = 0
        except BaseException as error:  # the thread ends: every waiter must be notified
            failure = self._backend.failure(error)
            self._dead = EngineStoppedError(failure) if failure else error
            if waiting is not None:
                waiting.set_exception(self._dead)
            raise
        finally:
            self._fail_all()
            self._backend.close()

    def _take(self) -> tuple[str, Any, Future[Any]] | None:
        idle = not self._running
        self.use.begin("idle" if idle else "sampling", len(self._running))
        return self._schedule.take(self._step, idle=idle)

    def _add_request(self, request: Request, future: Future[Completion]) -> None:
        if self._asleep:
            error = EngineAsleepError("the engine sleeps until it gets weights")
            return future.set_exception(error)
        request_id = next(self._ids)
        try:
            self._backend.add(request_id, request)
        except ValueError as error:  # e.g. a prompt that is too long
            return future.set_exception(error)
        self._running[request_id] = future
        self._entered_prompts += 1
        self._entered_tokens += len(request.prompt_ids)

    def _add_probe(self, future: Future[Any]) -> None:
        longest = self._backend.max_model_len - 1
        if not (ids := PROBE_IDS[: min(self._schedule.probe_tokens, longest)]):
            return future.set_result(None)
        request_id = next(self._ids)
        self._backend.add_probe(request_id, ids)
        self._running[request_id] = self._probe = future

    def _answer(self, results: Iterable[tuple[str, Result]]) -> None:
        for request_id, result in results:
            self._running.pop(request_id).set_result(result)

    def _swap_weights(
        self, version: int, weights: Mapping[str, torch.Tensor] | IncomingWeights
    ) -> None:
        self.use.begin("loading weights", len(self._running))
        while self._probe is not None and not self._probe.done():
            # Otherwise the probe of the earlier weights would be computed with these.
            self._answer(self._backend.step())
        self._answer(self._backend.finish_batches())
        self._backend.load(version, weights)
        self._asleep = False

    def _fall_asleep(self) -> int:
        if self._asleep:
            return 0
        self._answer(self._backend.finish_batches())
        # Nobody waits for these requests: the environment failed, or the run was rolled back.
        aborted, self._running = self._running, {}
        self._backend.abort(list(aborted))
        for future in aborted.values():
            future.set_exception(EngineAsleepError("the engine fell asleep"))
        self._backend.sleep()
        self._asleep = True
        return len(aborted)

    def _fail_all(self) -> None:
        error = EngineStoppedError(f"the engine stopped: {self._dead!r}")
        for future in self._running.values():
            future.set_exception(error)
        self._running.clear()
        for _, _, future in self._schedule.drain():
            future.set_exception(error)


def next_turn(
    engine: Engine, settings: GeneratorSettings, sample: Sample, tokens: list[int], used: int
) -> Future[Completion]:
    """Request the policy's next turn; the last `used` of the `tokens` are the response so far."""
    return engine.submit(
        tokens,
        max_tokens=settings.max_response_tokens - used,
        temperature=sample.temperature,
        # A later turn must not repeat the random numbers of the first.
        seed=sampling_seed(sample.seed, used) if used else sample.seed,
        stop_token_ids=settings.stop_token_ids or (),
        truncation=settings.truncation,
        name=sample.name,
    )
