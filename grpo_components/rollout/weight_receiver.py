"""Receives weights in vLLM's workers from a trainer, and checks each tensor before it is loaded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import Tensor

from grpo_components.exchange.weights import Manifest, TensorEntry, checksum, hash_values


class TransferCancelledError(RuntimeError):
    """The sender gave up before the first tensor: the engine keeps the weights that it has."""


class IncomingWeights:
    """Weights that a trainer announced; its calls arrive one by one, and the engine makes them."""

    def __init__(self, manifests: Iterable[Manifest], sender: str, timeout_s: float) -> None:
        self._entries: dict[str, TensorEntry] = {}
        for entry in (entry for manifest in manifests for entry in manifest):
            if entry.name in self._entries:
                raise ValueError(f"weight tensor {entry.name} appears twice")
            self._entries[entry.name] = entry
        self._sender, self._timeout_s = sender, timeout_s
        self._requests: SimpleQueue[tuple[str, Any, Future[None]]] = SimpleQueue()
        self._lock = threading.Lock()
        self._ended: BaseException | None = None
        self._has_ended = threading.Event()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each announced tensor, by its Hugging Face name."""
        return {name: entry.shape for name, entry in self._entries.items()}

    def ask(self, kind: str, info: Any = None) -> Future[None]:
        """Pass on a call of the sender; the result comes when the engine has made it."""
        answer: Future[None] = Future()
        with self._lock:
            if self._ended is None:
                self._requests.put((kind, info, answer))
            else:
                answer.set_exception(self._ended)
        return answer

    def abandon(self, reason: str) -> None:
        """Report that the sender makes no more calls; does nothing if all have been made."""
        self.ask("abandon", reason)

    def end(self, error: BaseException) -> None:
        """Fail the calls that wait, and every later one; does nothing at the second time."""
        with self._lock:
            self._ended = self._ended or error
        self._has_ended.set()
        while not self._requests.empty():
            _, _, answer = self._requests.get()
            answer.set_exception(error)

    def wait_ended(self, timeout_s: float) -> None:
        """Wait until the engine is done with a transfer that was abandoned."""
        if not self._has_ended.wait(timeout_s):
            problem = f"still waits for weights of {self._sender} after {timeout_s:g} s"
            raise RuntimeError(f"the engine {problem}")

    def receive(self, call: Callable[..., Any]) -> None:
        """Make the sender's calls in the workers until all weights are in use."""
        try:
            self._receive(partial(call, timeout=self._timeout_s))
        except BaseException as error:
            self.end(error)
            raise
        self.end(RuntimeError("the weights have arrived already"))

    def _receive(self, call: Callable[..., Any]) -> None:
        kind, started = "", False
        while kind != "finish":
            kind, info, answer = self._next()
            if kind == "abandon":
                raise (ConnectionError if started else TransferCancelledError)(info)
            try:
                if kind == "start":
                    started = True
                    call(_start, args=(self._entries,))
                else:
                    call(_CALLS[kind], args=() if info is None else (info,))
            except BaseException as error:
                answer.set_exception(error)
                raise
            answer.set_result(None)

    def _next(self) -> tuple[str, Any, Future[None]]:
        try:
            return self._requests.get(timeout=self._timeout_s)
        except Empty:
            problem = f"waited {self._timeout_s:g} s for {self._sender} to send weights"
            raise TimeoutError(f"the engine {problem}") from None


class CheckedModel:
    """Stands between a transfer engine and the model: passes on what has the right checksum."""

    def __init__(self, model: Any, entries: Mapping[str, TensorEntry]) -> None:
        self._model, self._left = model, dict(entries)
        self._not_loaded = {name for name, _ in model.named_parameters()}

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load tensors; see `receive` for errors."""
        loaded = self._model.load_weights(self._checked(weights))
        self._not_loaded -= loaded
        return loaded

    def check_complete(self) -> None:
        """Check that every tensor has come, and that every parameter got its values."""
        for name in sorted(self._left):
            raise ValueError(f"weight tensor {name} did not arrive")
        if self._not_loaded:
            names = ", ".join(sorted(self._not_loaded))
            raise RuntimeError(f"vLLM did not load the parameters {names:.200}")

    def _checked(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            entry = self._left.pop(name, None)
            if entry is None:
                raise ValueError(f"weight tensor {name} is unknown or appears twice")
            check_tensor(entry, tensor)
            yield name, tensor


def check_tensor(entry: TensorEntry, tensor: Tensor) -> None:
    """Check that a tensor, on any device, is the one that was pushed."""
    dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    if (dtype, shape) != (entry.dtype, entry.shape):
        pushed = f"{entry.dtype} {list(entry.shape)} was pushed"
        raise ValueError(f"weight tensor {entry.name} arrived as {dtype} {list(shape)}, {pushed}")
    if tensor.is_cuda:  # a copy to the host would hold up the engine
        is_same = int(hash_values(tensor)) == entry.values
    else:
        raw = tensor.detach().contiguous().flatten().view(torch.uint8).numpy()
        is_same = checksum(entry.name, dtype, shape, raw) == entry.checksum
    if not is_same:
        raise ValueError(f"weight tensor {entry.name} is damaged: checksum mismatch")


def _init(worker: Any, info: dict[str, Any]) -> None:
    worker.shutdown_weight_transfer_engine()  # leaves the group of a sender that was restarted
    worker.init_weight_transfer_engine(info)


def _start(worker: Any, entries: Mapping[str, TensorEntry]) -> None:
    # Imported in the worker: another library may run the engine, and vLLM not be installed.
    from grpo_components.rollout.vllm_weights import begin_reload

    engine = worker.weight_transfer_engine
    checked = CheckedModel(engine.model, entries)
    begin_reload(worker, worker.start_weight_update)
    engine.set_weight_update_target(checked, engine.model_config)


def _update(worker: Any, info: dict[str, Any]) -> None:
    worker.update_weights(info)


def _finish(worker: Any) -> None:
    from grpo_components.rollout.vllm_weights import finish_reload

    engine = worker.weight_transfer_engine
    checked = engine.model
    engine.reset_weight_update_target()
    checked.check_complete()
    finish_reload(worker, worker.finish_weight_update)


_CALLS: dict[str, Callable[..., None]] = {"init": _init, "update": _update, "finish": _finish}
"""What a call of the sender makes in each worker, by its kind; `start` has an argument of ours."""
