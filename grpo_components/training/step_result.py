"""What a training step returns to the driver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class StepResult:
    """The outcome of one training step, the same on every rank."""

    policy_version: int
    """Policy version after the step; a skipped step leaves it unchanged."""
    token_versions: Mapping[int, int]
    """Policy version -> number of trained tokens that it sampled, each token counted once."""
    token_logprobs: Mapping[int, Sequence[Mapping[str, Any]]]
    """Group id -> logprobs of each logged response (see `gather_logprobs`)."""
    trained_tokens: int
    skipped_because: str
    """Why the step trained nothing; empty if it trained."""
    metrics: dict[str, float]
    """Metrics by their names in `logs/metrics.jsonl`."""
    probe_logprobs: Sequence[float] = ()
    """Logprobs of fixed tokens after the step, to check weights; see `exchange/weight_probe.py`."""
    group_tokens: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    """Group id -> cause (`trained`, or why not; see `TokenUse`) -> number of sampled tokens."""
