"""Stand-ins for an inference engine and a reward pool; a test says what is sampled, and when."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from grpo_components.exchange.weights import check_names_and_shapes, shapes_of
from grpo_components.rewards.pool import Score
from grpo_components.rollout.engine_use import EngineUse
from grpo_components.rollout.samples import Completion, Watch

if TYPE_CHECKING:  # it imports vLLM
    from grpo_components.rollout.weight_receiver import IncomingWeights


def completion(
    token_ids: Sequence[int],
    version: int = 0,
    logprob: float = -0.5,
    finish_reason: Literal["stop", "length"] = "stop",
) -> Completion:
    """Return a completion whose tokens have one version and one logprob."""
    size = len(token_ids)
    return Completion(
        token_ids=np.array(token_ids, np.int64),
        logprobs=np.full(size, logprob, np.float32),
        token_versions=np.full(size, version, np.int32),
        finish_reason=finish_reason,
    )


@dataclass
class Request:
    """What was submitted, and what is sampled for it."""

    prompt_ids: list[int]
    max_tokens: int
    temperature: float
    seed: int
    stop_token_ids: Sequence[int]
    truncation: Mapping[str, float] | None
    name: str
    watch: Watch | None
    future: Future[Completion] = field(default_factory=Future)
    answer: Completion | None = None
    """The whole response, of which `step` samples token after token."""
    sampled: int = 0
    """Number of tokens sampled so far."""

    def step(self, count: int = 1) -> None:
        """Sample tokens; the last one, or one at which the watch ends, finishes the request."""
        given = self.answer
        assert given is not None
        ids = given.token_ids.tolist()
        for _ in range(count):
            self.sampled += 1
            size = min(self.sampled, self.max_tokens)
            if size >= len(ids):
                self.future.set_result(given)
            elif size == self.max_tokens or (self.watch and self.watch(ids[:size])):
                names = ("token_ids", "logprobs", "token_versions")
                cut = {name: getattr(given, name)[:size] for name in names}
                reason = "length" if size == self.max_tokens else "stop"
                self.future.set_result(replace(given, **cut, finish_reason=reason))
            if self.future.done():
                return

    def finish(self) -> None:
        while not self.future.done():
            self.step()


class StandInEngine:
    """Stands for `Engine`: `answer` says what a request samples, `arrived` makes it sample."""

    def __init__(
        self,
        answer: Callable[[Request], Completion],
        arrived: Callable[[Request], None] = Request.finish,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        self.answer, self.arrived, self.shapes = answer, arrived, shapes
        self.use = EngineUse(4)
        self.requests: list[Request] = []
        self.loaded: list[Any] = []
        """The version and weights of each load, and "asleep"."""
        self.probe: Any = None
        """What a load of weights returns."""
        self.left = 0
        """Number of requests that `sleep` aborts."""

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
        sampling = (max_tokens, temperature, seed, stop_token_ids, truncation)
        request = Request(list(prompt_ids), *sampling, name, watch)
        self.requests.append(request)
        request.answer = self.answer(request)
        self.arrived(request)
        return request.future

    def sleep(self) -> Future[int]:
        self.loaded.append("asleep")
        return _done(self.left)

    def load_weights(
        self, version: int, weights: Mapping[str, torch.Tensor] | IncomingWeights
    ) -> Future[Any]:
        """Do as `Engine.load_weights`; weights that a trainer still sends are awaited at once."""
        is_coming = not isinstance(weights, Mapping)
        shapes = weights.shapes if is_coming else shapes_of(weights)
        check_names_and_shapes(shapes, self.shapes)
        if is_coming:
            weights.awaited.set_result(None)
        self.loaded.append((version, weights))
        return _done(None if is_coming else self.probe)

    def close(self) -> None: ...


class StandInPool:
    """Stands for a `RewardPool`: scores at once."""

    def __init__(self, scores: Callable[[Sequence[Any]], list[Score]]) -> None:
        self._scores, self.begun = scores, []

    def begin(self, sample: Any) -> Future[Score]:
        self.begun.append(sample)
        return _done(self._scores([sample])[0])

    def __call__(self, samples: Sequence[Any]) -> list[Score]:
        return self._scores(samples)

    def close(self) -> None: ...


def _done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future
