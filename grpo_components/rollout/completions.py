"""What is asked of an engine, what it answers, and what its library does for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from grpo_components.exchange.weight_probe import ProbeReading

if TYPE_CHECKING:  # it imports vLLM
    from grpo_components.rollout.weight_receiver import IncomingWeights

BASE_VERSION = 0
"""Policy version of the weights that the engine loads first."""

Watch = Callable[[Sequence[int]], bool]
"""Function of all tokens that were sampled so far; returns whether sampling ends here."""


@dataclass(frozen=True, slots=True)
class Request:
    """One response that is asked for."""

    prompt_ids: list[int]
    max_tokens: int
    temperature: float
    seed: int
    stop_token_ids: Sequence[int]
    truncation: Mapping[str, float]
    """Sampler settings beside the temperature, by vLLM's names; see `TRUNCATION`."""
    watch: Watch | None


@dataclass(frozen=True)
class Completion:
    """What the engine sampled for one request."""

    token_ids: NDArray[np.int64]
    """[R] sampled tokens, including the stop token if one was sampled."""
    logprobs: NDArray[np.float32]
    """[R] log-probability of each token in nats, under the distribution it was sampled from."""
    token_versions: NDArray[np.int32]
    """[R] version of the policy that sampled each token."""
    finish_reason: Literal["stop", "length", "abort"]
    cached_tokens: int = 0
    """Tokens of the prompt whose keys and values were in the prefix cache."""


Result = Completion | ProbeReading


class Backend(Protocol):
    """The library that samples; the engine's thread makes all calls, between two steps."""

    max_model_len: int
    """Longest prompt and response together, in tokens."""

    def add(self, request_id: str, request: Request) -> None:
        """Begin a request; raises a ValueError if it cannot be answered."""
        ...

    def add_probe(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Begin the weight probe, before all requests that wait."""
        ...

    def step(self) -> Iterable[tuple[str, Result]]:
        """Sample a token for each running request; returns what is finished."""
        ...

    def finish_batches(self) -> Iterable[tuple[str, Result]]:
        """Finish the batches that a step has left under way; returns what they finished."""
        ...

    def load(self, version: int, weights: Mapping[str, Any] | IncomingWeights) -> None:
        """Replace the weights, and wake up; later requests must not read KV of the old weights."""
        ...

    def abort(self, request_ids: list[str]) -> None:
        """Forget requests."""
        ...

    def sleep(self) -> None:
        """Free the GPU's memory until the next load; no request is running."""
        ...

    def failure(self, error: BaseException) -> str:
        """Return the cause of an error where it does not say so itself; else nothing."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...
