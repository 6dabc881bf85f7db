"""What the records up to some step say of groups, prompts and weights."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

Record = dict[str, Any]
Prompt = tuple[int, int]
"""Row of the data set, and epoch."""


@dataclass
class Group:
    """A living group."""

    prompt: Prompt
    response_tokens: float | None = None
    """On average over its responses; None until it is generated."""


@dataclass
class History:
    """What the records up to some step say; a resumed attempt goes on from one."""

    step: int = 0
    policy_version: int = 0
    issued: int = 0
    trained: int = 0
    dropped: int = 0
    living: dict[int, Group] = field(default_factory=dict)
    waiting: Counter[Prompt] = field(default_factory=Counter)
    issued_prompts: set[Prompt] = field(default_factory=set)
    trained_prompts: set[Prompt] = field(default_factory=set)
    batch_hashes: set[str] = field(default_factory=set)
    checksums: dict[int, str] = field(default_factory=dict)
    """Of each acknowledged version."""
    unacknowledged: dict[int, int] = field(default_factory=dict)
    """Versions of trained tokens that no generator acknowledged yet, and the step."""
