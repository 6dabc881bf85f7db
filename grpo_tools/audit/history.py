"""The state of groups, prompts and weights after a step, rebuilt from the records."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from grpo_components.data.curriculum import Curriculum
from grpo_components.exchange.group_reuse import Candidate, ReusePool

Record = dict[str, Any]
Prompt = tuple[int, int]
"""(row of the data set, epoch)."""


@dataclass
class Group:
    """A group that is neither trained nor dropped yet."""

    prompt: Prompt
    tokens: int | None = None
    """Number of tokens of its responses; None until the group is generated."""
    in_flight: bool = True
    """Whether it was issued since its generator was lost."""


@dataclass
class History:
    """State of a run after a step; an attempt that resumes after that step continues from it."""

    step: int = 0
    policy_version: int = 0
    issued: int = 0
    trained: int = 0
    dropped: int = 0
    reused: int = 0
    """How often steps trained a group again."""
    living: dict[int, Group] = field(default_factory=dict)
    """Groups that are neither trained nor dropped, by group number."""
    waiting: Counter[Prompt] = field(default_factory=Counter)
    """Prompts of dropped groups that must be issued again, each with how many times."""
    issued_prompts: set[Prompt] = field(default_factory=set)
    trained_prompts: set[Prompt] = field(default_factory=set)
    batch_hashes: set[str] = field(default_factory=set)
    checksums: dict[int, str] = field(default_factory=dict)
    """Policy version that a generator acknowledged -> checksum of its weights."""
    unacknowledged: dict[int, int] = field(default_factory=dict)
    """Policy version that no generator acknowledged yet -> last step that trained its tokens."""
    curriculum: Curriculum | None = None
    """Draws the prompts once more; None if the run has no curriculum, or an impossible one."""
    pool: ReusePool | None = None
    """Chooses the reused groups once more; None if nothing is reused."""
    once_trained: dict[int, tuple[Group, Candidate]] = field(default_factory=dict)
    """Where groups are reused: all trained groups, by group number."""
