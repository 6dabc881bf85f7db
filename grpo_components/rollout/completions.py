"""What the engine sampled for one request, made from vLLM's outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Watch = Callable[[Sequence[int]], bool]
"""Function of all tokens that were sampled so far; returns whether sampling ends here."""


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


def finished_completion(output: Any) -> Completion:
    """Convert vLLM's last output of a request."""
    found = output.outputs[0]
    versions = np.full(len(found.token_ids), -1, dtype=np.int32)
    for span in found.weight_versions:
        versions[span.start : span.end] = int(span.version)
    return _completion(output, versions, found.finish_reason)


@dataclass
class WatchedRequest:
    """A request whose tokens are shown while they are sampled, and that may be ended by them."""

    watch: Watch
    _versions: list[int] = field(default_factory=list)

    def follow(self, output: Any, version: int) -> Completion | None:
        """Show the tokens of an output that is not the last one."""
        token_ids = output.outputs[0].token_ids
        self._versions += [version] * (len(token_ids) - len(self._versions))
        if not self.watch(token_ids):
            return None
        return _completion(output, np.array(self._versions, dtype=np.int32), "stop")


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
