"""The rungs of the equivalence ladder that compare vLLM engines."""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from grpo_components.cluster.cluster import engine_environment
from grpo_components.equivalence.families import FAMILIES, random_checkpoint
from grpo_components.equivalence.roles import ENGINES, RoleProcess
from grpo_components.equivalence.rungs import Bench, saved_weights
from grpo_components.exchange.weights import Manifest, pack_bucket

_SHARED = [7 + number % 200 for number in range(150)]
"""Start of a prompt that is longer than a block of the prefix cache (128 tokens on a CPU)."""


def pulled_engine_is_fresh_engine(bench: Bench) -> float:
    """Tokens and logprobs after a swap of the weights, and by a new engine; tied and untied."""
    prompts = [[5, 6, 7, number + 1] for number in range(6)] + [[*_SHARED, n] for n in (1, 2)]
    worst = 0.0
    with closing(RoleProcess(ENGINES, env=_engine_environment())) as engines:
        for base, new in _weights_before_and_after(bench):
            pulled = engines.call("sample", str(base), _bucket(new), prompts)
            fresh = engines.call("sample", str(new), None, prompts)
            worst = max(worst, _difference_of_completions(pulled, fresh))
    return worst


def engine_pulled_under_load_is_fresh_engine(bench: Bench) -> float:
    """What new requests get while older ones run on over the swap, and from a new engine."""
    prompts = [[*_SHARED, number] for number in range(4)]
    worst = 0.0
    with closing(RoleProcess(ENGINES, env=_engine_environment())) as engines:
        for base, new in _weights_before_and_after(bench):
            pulled, load = engines.call("sample_under_load", str(base), _bucket(new), prompts)
            if any(set(completion.token_versions) != {0, 1} for completion in load):
                return math.inf  # it was not under load
            if any(set(completion.token_versions) != {1} for completion in pulled):
                return math.inf
            fresh = engines.call("sample", str(new), None, prompts)
            worst = max(worst, _difference_of_completions(pulled, fresh))
    return worst


def _engine_environment() -> dict[str, str]:
    return engine_environment("cpu", "WARNING", kv_cache_gib=1)


def _weights_before_and_after(bench: Bench) -> list[tuple[Path, Path]]:
    """Folders of two random models, with tied and with untied embeddings."""
    families = [FAMILIES["QWEN2 (tied)"], FAMILIES["QWEN2 (untied)"]]
    return [
        (random_checkpoint(family, bench.folder(), 0), random_checkpoint(family, bench.folder(), 1))
        for family in families
    ]


def _bucket(folder: Path) -> tuple[Manifest, Any]:
    return pack_bucket(list(saved_weights(folder).items()))


def _difference_of_completions(left: list[Any], right: list[Any]) -> float:
    """The largest difference of logprobs in nats; infinite where a token is another."""
    worst = 0.0
    for a, b in zip(left, right, strict=True):
        if not np.array_equal(a.token_ids, b.token_ids):
            return math.inf
        worst = max(worst, float(np.abs(a.logprobs - b.logprobs).max()))
    return worst
