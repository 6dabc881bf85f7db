"""Derives time-outs from the lengths of a config's prompts and responses."""

from __future__ import annotations

_SECONDS_PER_SAMPLED_TOKEN = 0.15
"""Of one response in a full batch; an engine whose cache is full takes a third of this."""
_SECONDS_PER_TRAINED_TOKEN = 0.01
"""Of a trainer rank; a slow one of a large model takes a tenth of this."""
_ROLLOUT_S, _BATCH_S, _TRAIN_STEP_S, _COLLECTIVE_S = 600.0, 1200.0, 1800.0, 600.0
"""Lowest limits, for short responses: starts, compilation and pulls take time as well."""
_LONGEST_S = 1e6
"""Highest limit: what a config allows is twice this."""


def derived_limits(
    *,
    prompt_tokens: int,
    response_tokens: int,
    samples_per_rank: float,
    tokens_per_micro_batch: int,
    passes: int,
) -> dict[str, float]:
    """Return the time-outs that depend on lengths, in seconds."""
    rollout = max(_ROLLOUT_S, response_tokens * _SECONDS_PER_SAMPLED_TOKEN)
    tokens = samples_per_rank * (prompt_tokens + response_tokens) * passes
    limits = {
        "rollout_s": rollout,
        "batch_s": max(_BATCH_S, 2 * rollout),
        "train_step_s": max(_TRAIN_STEP_S, tokens * _SECONDS_PER_TRAINED_TOKEN),
        "collective_s": max(_COLLECTIVE_S, tokens_per_micro_batch * _SECONDS_PER_TRAINED_TOKEN),
    }
    return {name: min(limit_s, _LONGEST_S) for name, limit_s in limits.items()}
