"""The driver's summary of a training batch; the trajectories stay in Ray's object store."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grpo_components.exchange.ledger import LedgerEntry
from grpo_components.trajectory import GroupSummary


@dataclass(frozen=True)
class Batch:
    """Summary of a training step's groups: new groups, then reused ones, each sorted by id."""

    packed: Any
    """Ray reference to the packed trajectories. Each of the B * G responses (B groups of G) has one
    trajectory or several."""
    groups: Sequence[GroupSummary]
    entries: Sequence[LedgerEntry]
    batch_hash: str
    buffered: int
    """Number of groups left in the replay buffer."""
    dropped_stale: int
    """Number of groups dropped as stale (sampled by too old weights) while this batch was taken."""
    waited_s: float
    """How long the trainers waited for this batch, in seconds."""
    began: float = field(default_factory=time.perf_counter)
    """When the trainers began to wait, by `time.perf_counter`."""
    reused: int = 0
    """Number of reused groups, on which earlier steps also trained; they come last."""

    @property
    def group_ids(self) -> NDArray[np.int64]:
        """[B] id of each group."""
        return np.array([group.group_id for group in self.groups])

    @property
    def rewards(self) -> NDArray[np.float64]:
        """[B, G] rewards; NaN where a sample failed."""
        return np.array([group.rewards for group in self.groups])

    @property
    def response_lengths(self) -> NDArray[np.int64]:
        """[B, G] number of tokens in each response, including environment tokens."""
        return np.array([group.response_lengths for group in self.groups])

    @property
    def cut_off(self) -> NDArray[np.bool_]:
        """[B, G] whether a length limit ended the response."""
        return np.array([group.finish_reasons for group in self.groups]) == "length"

    @property
    def reference_kl(self) -> NDArray[np.float64] | None:
        """[B, G] estimated KL to the reference, in nats; None without a reference."""
        values = [entry.reference_kl for entry in self.entries]
        return None if any(value is None for value in values) else np.array(values)
