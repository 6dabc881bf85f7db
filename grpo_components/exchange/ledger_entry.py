"""Defines the ledger's entry of one group: its prompt, its state, and references to its data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from grpo_components.trajectory import Prompt

State = Literal["in_flight", "buffered", "in_training", "trained"]


@dataclass
class LedgerEntry:
    """What the ledger, which tracks each group of a run, knows of one group.

    The group is living (neither trained nor dropped), or trained and kept to be trained again.
    """

    group_id: int
    """Number in the order of admission, from 0."""
    prompt: Prompt
    epoch: int
    needed_version: int
    """Oldest policy version that may generate the group."""
    start_version: int
    """Policy version of the generator when the group started; at least `needed_version`."""
    target_step: int
    """Training step, from 0, that the group is admitted for, by its place in the queue."""
    state: State = "in_flight"
    reference_kl: list[float] | None = None
    """[G] estimated KL to the reference of each response, in nats; None without a reference."""
    text: Any = None
    """Ray reference to the group as text, for the rollout log; None after a resume."""
    parts: Sequence[Any] = ()
    """Ray references to the packed group and its summary; empty until the group is generated."""
    tokens: int | None = None
    """Number of tokens sampled for the group; None until it is generated."""

    @property
    def prompt_index(self) -> int:
        """Row of the prompt in the data set."""
        return self.prompt["prompt_index"]

    def state_dict(self) -> dict[str, Any]:
        """Return the entry as plain values, without its Ray references."""
        return vars(self) | {"text": None, "parts": ()}
