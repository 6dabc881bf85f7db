"""The request to an engine for one response, and the completion that it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from grpo_components.exchange.weight_probe import ProbeReading

BASE_VERSION = 0
"""Policy version of the weights that the engine loads first."""

Watch = Callable[[Sequence[int]], bool]
"""Function of all tokens that were sampled so far; returns whether sampling ends here."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request for one response."""

    prompt_ids: list[int]
    max_tokens: int
    temperature: float
    seed: int
    stop_token_ids: Sequence[int]
    truncation: Mapping[str, float]
    """Sampler settings other than the temperature, by vLLM's names; see `TRUNCATION`."""
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
