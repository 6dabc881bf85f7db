"""Records or repeats an engine's schedule: which commands enter before which engine step."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Generic, TypeVar

from grpo_components.errors import ReplayError
from grpo_components.files import cut_torn_line

STOP = "stop"
"""Name of the command that ends the engine; it is never recorded and never waits its turn."""
PROBE_TOKENS = 40
"""Tokens of the weight probe, which enters an engine after each swap of weights: more than a block
of the prefix cache, which keeps whole blocks only (32 tokens on a CPU, 16 on a GPU)."""
_MAX_NAMES_SHOWN = 8
_Command = TypeVar("_Command")


class Schedule(Generic[_Command]):
    """Hands commands to an engine's thread: as they arrive, or in a replay as recorded.

    An engine computes the same bits if the same requests and weights enter before the same steps.
    So a replay needs only this file and the weights to sample the same tokens again.
    """

    def __init__(
        self,
        path: Path | None = None,
        recorded: Iterable[tuple[int, str]] | None = None,
        timeout_s: float = 0.0,
        *,
        restart_count: int = 0,
        killed: bool = False,
        probe_tokens: int = PROBE_TOKENS,
    ) -> None:
        self.probe_tokens = probe_tokens
        self._file = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")
            self._write_line({"life": restart_count, "probe_tokens": probe_tokens})
        self._recorded = None if recorded is None else deque(recorded)
        self._left = Counter(name for _, name in self._recorded or ())
        self._timeout_s, self._killed = timeout_s, killed
        self._arrived: deque[tuple[str, _Command]] = deque()
        self._changed = threading.Condition()
        self._entered: list[str] = []

    def put(self, name: str, command: _Command) -> None:
        """Queue a command; may be called from any thread."""
        with self._changed:
            if self._recorded is not None and name != STOP and not self._killed:
                if not self._left[name]:
                    raise ReplayError(f"the recorded run had no {name} here (any more)")
                self._left[name] -= 1
            self._arrived.append((name, command))
            self._changed.notify_all()

    def take(self, step: int, idle: bool) -> _Command | None:
        """Return the next command that enters before a step; called by the engine's thread."""
        with self._changed:
            if self._recorded is not None:
                index = self._find_recorded(self._recorded, step, idle)
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
        """Remove and return the queued commands, once the engine has ended."""
        with self._changed:
            commands = [command for _, command in self._arrived]
            self._arrived.clear()
            return commands

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _find_recorded(self, recorded: deque[tuple[int, str]], step: int, idle: bool) -> int | None:
        """Return the index of the command to take, waiting for one that is due; None if none is."""
        due_step, due_name = recorded[0] if recorded else (step, STOP)
        if recorded and due_step > step:
            if idle and self._index(STOP) is None:
                raise ReplayError(
                    f"the engine ran dry before its step {step}; the recorded one went on until "
                    f"{due_name} entered before step {due_step}"
                )
            return self._index(STOP)
        if not recorded and not idle:
            return self._index(STOP)

        def arrived() -> bool:
            return self._index(due_name) is not None or self._index(STOP) is not None

        # After the last recorded command, wait without limit for the command that ends the engine.
        if not self._changed.wait_for(arrived, self._timeout_s if recorded else None):
            queued = ", ".join(name for name, _ in list(self._arrived)[:_MAX_NAMES_SHOWN])
            raise ReplayError(
                f"the engine waited {self._timeout_s:g} s for {due_name} before its step {step}; "
                f"queued: {queued or 'nothing'}"
            )
        index = self._index(STOP)
        if index is None:
            recorded.popleft()
            index = self._index(due_name)
        return index

    def _index(self, wanted: str) -> int | None:
        return next((i for i, (name, _) in enumerate(self._arrived) if name == wanted), None)

    def _write(self, step: int) -> None:
        entered, self._entered = self._entered, []
        if entered and self._file is not None:
            self._write_line({"step": step, "entered": entered, "time": round(time.time(), 6)})

    def _write_line(self, line: dict[str, Any]) -> None:
        assert self._file is not None
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def schedule_file(folder: Path, number: int) -> Path:
    """Return the path of a generator's schedule."""
    return folder / f"schedule_generator_{number}.jsonl"


def open_schedule(
    number: int,
    folder: str | None,
    replayed_folder: str | None,
    timeout_s: float,
    restart_count: int = 0,
) -> Schedule[Any]:
    """Open a generator's schedule to write it, and in a replay to repeat the recorded one."""
    recorded, killed, probe_tokens = None, False, PROBE_TOKENS
    if replayed_folder is not None:
        by_restart, probe_tokens = _read(schedule_file(Path(replayed_folder), number))
        # A process that ended before its engine was built left no commands.
        recorded = by_restart.get(restart_count, [])
        killed = restart_count < max(by_restart, default=0)
    path = None if folder is None else schedule_file(Path(folder), number)
    if path is not None:
        cut_torn_line(path)
    options = {"killed": killed, "probe_tokens": probe_tokens}
    return Schedule(path, recorded, timeout_s, restart_count=restart_count, **options)


def _read(path: Path) -> tuple[dict[int, list[tuple[int, str]]], int]:
    """Read (engine step, name) of each command, by the restart count of the process."""
    by_restart: dict[int, list[tuple[int, str]]] = {}
    probe_tokens = PROBE_TOKENS
    entered: list[tuple[int, str]] = []
    with path.open(encoding="utf-8") as lines:
        for line in map(json.loads, lines):
            if "life" in line:
                entered = by_restart[line["life"]] = []
                probe_tokens = line["probe_tokens"]
            else:
                entered += [(line["step"], name) for name in line["entered"]]
    return by_restart, probe_tokens
