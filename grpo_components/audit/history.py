"""The state of groups, prompts and weights after a step, as the records give it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

Record = dict[str, Any]
Prompt = tuple[int, int]
"""Row of the data set, and epoch."""


@dataclass
class Group:
    """A group that is neither trained nor dropped yet."""

    prompt: Prompt
    response_tokens: float | None = None
    """Mean over its responses; None until it is generated."""


@dataclass
class History:
    """State after a step. A resumed attempt continues from the state of its checkpoint's step."""

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
    """Acknowledged version -> its checksum."""
    unacknowledged: dict[int, int] = field(default_factory=dict)
    """Version of trained tokens that no generator has acknowledged yet -> the step."""
