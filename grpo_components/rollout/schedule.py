"""Queues commands for an engine's thread; records before which step each ran, for a replay."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Condition
from typing import Any, Generic, Protocol, TypeVar

from grpo_components.exchange.weight_probe import PROBE_TOKENS
from grpo_components.files import cut_torn_line

STOP = "stop"
"""Name of the command that ends the engine; it is not recorded, and in a replay never waits."""
_Command = TypeVar("_Command")
Arrived = Sequence[tuple[str, Any]]
"""Waiting commands, each with its name, in the order of their arrival."""


class RecordedCommands(Protocol):
    """Commands of an earlier run that a replay repeats (`grpo_tools/replay/recorded_run.py`)."""

    probe_tokens: int
    """Number of tokens of the recorded engine's weight probe (its test sequence)."""

    def expect(self, name: str) -> None:
        """Refuse a command that the recorded engine did not get."""

    def choose(self, arrived: Arrived, changed: Condition, step: int, idle: bool) -> int | None:
        """Return the index in `arrived` of the command that is due before a step; None if none is.

        Waits until a due command arrives. The caller holds `changed`, which each arrival notifies.
        """
        ...


class Schedule(Generic[_Command]):
    """Queues commands for an engine's thread: in order of arrival or, in a replay, as recorded.

    An engine computes the same bits if the same requests and weights enter before the same steps.
    So a replay needs only the schedule's file and the weights to sample the same tokens again.
    """

    def __init__(
        self,
        path: Path | None = None,
        recorded: RecordedCommands | None = None,
        *,
        restart_count: int = 0,
    ) -> None:
        self.probe_tokens = recorded.probe_tokens if recorded else PROBE_TOKENS
        self._file, self._recorded = None, recorded
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")
            self._write_line({"life": restart_count, "probe_tokens": self.probe_tokens})
        self._arrived: deque[tuple[str, _Command]] = deque()
        self._changed = Condition()
        self._entered: list[str] = []

    def put(self, name: str, command: _Command) -> None:
        """Queue a command; may be called from any thread."""
        with self._changed:
            if self._recorded is not None and name != STOP:
                self._recorded.expect(name)
            self._arrived.append((name, command))
            self._changed.notify_all()

    def take(self, step: int, idle: bool) -> _Command | None:
        """Return the next command to run before a step, or None; the engine's thread calls this."""
        with self._changed:
            if self._recorded is not None:
                index = self._recorded.choose(self._arrived, self._changed, step, idle)
            else:
                index = 0 if self._arrived or idle else None
                if not self._arrived:
                    self._write(step)
                if idle:
                    self._changed.wait_for(lambda: self._arrived)
            if index is None:
                self._write(step)
                return None
            name, command = self._arrived[index]
            del self._arrived[index]
            if name == STOP:
                self._write(step)
            else:
                self._entered.append(name)
            return command

    def drain(self) -> list[_Command]:
        """Remove and return the queued commands; called once the engine has ended."""
        with self._changed:
            commands = [command for _, command in self._arrived]
            self._arrived.clear()
            return commands

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _write(self, step: int) -> None:
        entered, self._entered = self._entered, []
        if entered and self._file is not None:
            self._write_line({"step": step, "entered": entered, "time": round(time.time(), 6)})

    def _write_line(self, line: dict[str, Any]) -> None:
        assert self._file is not None
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def schedule_file(folder: Path, number: int) -> Path:
    """Return the path of the schedule file of generator `number`."""
    return folder / f"schedule_generator_{number}.jsonl"


def open_schedule(
    folder: str,
    recorded: Callable[[int, int], RecordedCommands] | None = None,
    *,
    number: int = 0,
    restart_count: int = 0,
) -> Schedule[Any]:
    """Open a generator's schedule file to append; in a replay, `recorded` reads the earlier run."""
    path = schedule_file(Path(folder), number)
    cut_torn_line(path)
    commands = recorded(number, restart_count) if recorded else None
    return Schedule(path, commands, restart_count=restart_count)
