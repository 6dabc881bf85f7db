"""Lets commands enter a replay's engine before the steps that they entered in the recorded run."""

from __future__ import annotations

import json
import threading
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from grpo_components.errors import ReplayError
from grpo_components.exchange.weight_probe import PROBE_TOKENS
from grpo_components.rollout.schedule import STOP, schedule_file

_MAX_NAMES_SHOWN = 8


class RecordedSchedule:
    """The `RecordedCommands` of one process of a generator: (engine step, name) of each.

    A process that was killed may get more commands than it took.
    """

    def __init__(
        self,
        entries: Iterable[tuple[int, str]],
        timeout_s: float,
        *,
        killed: bool = False,
        probe_tokens: int = PROBE_TOKENS,
    ) -> None:
        self.probe_tokens = probe_tokens
        self._entries = deque(entries)
        self._left = Counter(name for _, name in self._entries)
        self._timeout_s, self._killed = timeout_s, killed

    def expect(self, name: str) -> None:
        """Refuse a command that the recorded engine did not get."""
        if self._killed:
            return
        if not self._left[name]:
            raise ReplayError(f"the recorded run had no {name} here (any more)")
        self._left[name] -= 1

    def choose(
        self,
        arrived: Sequence[tuple[str, Any]],
        changed: threading.Condition,
        step: int,
        idle: bool,
    ) -> int | None:
        """Return the index of the command that enters before a step; wait for one that is due."""
        entries = self._entries
        due_step, due_name = entries[0] if entries else (step, STOP)

        def index_of(wanted: str) -> int | None:
            return next((i for i, (name, _) in enumerate(arrived) if name == wanted), None)

        if entries and due_step > step:
            if idle and index_of(STOP) is None:
                raise ReplayError(
                    f"the engine ran dry before its step {step}; the recorded one went on until "
                    f"{due_name} entered before step {due_step}"
                )
            return index_of(STOP)
        if not entries and not idle:
            return index_of(STOP)

        def is_there() -> bool:
            return index_of(due_name) is not None or index_of(STOP) is not None

        # After the last recorded command, wait without limit for the command that ends the engine.
        if not changed.wait_for(is_there, self._timeout_s if entries else None):
            queued = ", ".join(name for name, _ in list(arrived)[:_MAX_NAMES_SHOWN])
            raise ReplayError(
                f"the engine waited {self._timeout_s:g} s for {due_name} before its step {step}; "
                f"queued: {queued or 'nothing'}"
            )
        if (index := index_of(STOP)) is None:
            entries.popleft()
            index = index_of(due_name)
        return index


def read_schedule(
    folder: str, timeout_s: float, number: int = 0, restart_count: int = 0
) -> RecordedSchedule:
    """Read the schedule of a generator's process with the same number of restarts."""
    by_restart: dict[int, list[tuple[int, str]]] = {}
    probe_tokens = PROBE_TOKENS
    entered: list[tuple[int, str]] = []
    with schedule_file(Path(folder), number).open(encoding="utf-8") as lines:
        for line in map(json.loads, lines):
            if "life" in line:
                entered = by_restart[line["life"]] = []
                probe_tokens = line["probe_tokens"]
            else:
                entered += [(line["step"], name) for name in line["entered"]]
    # A process that ended before its engine was built left no commands.
    entries = by_restart.get(restart_count, [])
    killed = restart_count < max(by_restart, default=0)
    return RecordedSchedule(entries, timeout_s, killed=killed, probe_tokens=probe_tokens)
