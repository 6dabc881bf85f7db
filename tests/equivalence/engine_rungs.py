"""Rungs of the equivalence ladder that compare vLLM engines."""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from equivalence.families import FAMILIES, random_checkpoint
from equivalence.roles import ENGINES, RoleProcess
from equivalence.rungs import Bench, saved_weights
from grpo_components.exchange.weights import Manifest, pack_bucket

_LONG_PREFIX = [7 + number % 200 for number in range(150)]
"""Prompt tokens, more than one block of the prefix cache (32 tokens on a CPU)."""


def pulled_engine_is_fresh_engine(bench: Bench) -> float:
    """Compare samples of an engine whose weights were swapped with those of a fresh engine."""
    prompts = [[5, 6, 7, number + 1] for number in range(6)] + [[*_LONG_PREFIX, n] for n in (1, 2)]
    worst = 0.0
    with closing(RoleProcess(ENGINES)) as engines:
        for base, new in _weights_before_and_after(bench):
            pulled = engines.call("sample", str(base), _bucket(new), prompts)
            fresh = engines.call("sample", str(new), None, prompts)
            worst = max(worst, difference_of_completions(pulled, fresh))
    return worst


def engine_pulled_under_load_is_fresh_engine(bench: Bench) -> float:
    """Compare samples of an engine whose weights were swapped under load with a fresh engine's.

    The compared requests begin after the swap, while earlier requests keep running.
    """
    prompts = [[*_LONG_PREFIX, number] for number in range(4)]
    worst = 0.0
    with closing(RoleProcess(ENGINES)) as engines:
        for base, new in _weights_before_and_after(bench):
            pulled, load = engines.call("sample_under_load", str(base), _bucket(new), prompts)
            if any(set(completion.token_versions) != {0, 1} for completion in load):
                return math.inf  # a response lacks tokens of the old or of the new weights
            if any(set(completion.token_versions) != {1} for completion in pulled):
                return math.inf
            fresh = engines.call("sample", str(new), None, prompts)
            worst = max(worst, difference_of_completions(pulled, fresh))
    return worst


def two_workers_are_one(bench: Bench) -> float:
    """Compare engines of two tensor-parallel workers and of one, both pulling weights under load.

    The compared requests run during the swap or begin after it.
    """
    prompts = [[*_LONG_PREFIX, number] for number in range(4)]
    base, new = _weights_before_and_after(bench)[-1]
    with closing(RoleProcess(ENGINES)) as engines:
        one, two = (
            engines.call("sample_under_load", str(base), _bucket(new), prompts, num_workers)
            for num_workers in (1, 2)
        )
    for a, b in zip(one[1], two[1], strict=True):
        if not np.array_equal(a.token_versions, b.token_versions):
            return math.inf
    return max(difference_of_completions(one[n], two[n]) for n in (0, 1))


def _weights_before_and_after(bench: Bench) -> list[tuple[Path, Path]]:
    """Save old and new random models, with tied and untied embeddings; return their folders."""
    families = [FAMILIES["QWEN2 (tied)"], FAMILIES["QWEN2 (untied)"]]
    return [
        (random_checkpoint(family, bench.folder(), 0), random_checkpoint(family, bench.folder(), 1))
        for family in families
    ]


def _bucket(folder: Path) -> tuple[Manifest, Any]:
    return pack_bucket(list(saved_weights(folder).items()))


def difference_of_completions(left: list[Any], right: list[Any]) -> float:
    """Return the largest logprob difference in nats; infinite if any token differs."""
    worst = 0.0
    for a, b in zip(left, right, strict=True):
        if not np.array_equal(a.token_ids, b.token_ids):
            return math.inf
        worst = max(worst, float(np.abs(a.logprobs - b.logprobs).max()))
    return worst
