"""An engine's schedule: what entered it before which of its steps, written down or kept."""

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
"""Name of the command that ends the engine: it is never written down, and never waits."""
_SHOWN = 8
_Command = TypeVar("_Command")


class Schedule(Generic[_Command]):
    """Hands commands to an engine's thread: as they come, or in a replay as they once came.

    An engine computes the same bits from the same requests and weights before the same steps, so
    that this file and the weights are all that a replay of its tokens needs.

    Args:
        path: of the file that gets one JSON object per step that something entered before; None
            writes nothing.
        recorded: (engine step, name) of every command of the run to replay, in order; None takes
            commands as they come.
        timeout_s: longest wait for a recorded command.
        life: of the generator's process, from 0.
        killed: the recorded engine did not come to its end: after its last command this one goes
            on until it is killed, too.
    """

    def __init__(
        self,
        path: Path | None = None,
        recorded: Iterable[tuple[int, str]] | None = None,
        timeout_s: float = 0.0,
        *,
        life: int = 0,
        killed: bool = False,
    ) -> None:
        self._file = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")
            self._write_line({"life": life})
        self._recorded = None if recorded is None else deque(recorded)
        self._left = Counter(name for _, name in self._recorded or ())
        self._timeout_s, self._killed = timeout_s, killed
        self._arrived: deque[tuple[str, _Command]] = deque()
        self._changed = threading.Condition()
        self._entered: list[str] = []

    def put(self, name: str, command: _Command) -> None:
        """Queue a command; from any thread.

        Args:
            name: what a replay knows it by; of several with one name the first is taken first.
            command: for the engine's thread.

        Raises:
            ReplayError: if the recorded run never had it, or not so often.
        """
        with self._changed:
            if self._recorded is not None and name != STOP and not self._killed:
                if not self._left[name]:
                    raise ReplayError(f"the recorded run had no {name} here (any more)")
                self._left[name] -= 1
            self._arrived.append((name, command))
            self._changed.notify_all()

    def take(self, step: int, idle: bool) -> _Command | None:
        """The next command that enters before a step; by the engine's thread.

        Args:
            step: number of the engine's next step.
            idle: the engine has nothing to do; then wait for a command.

        Returns:
            The command; None once the step shall be made.

        Raises:
            ReplayError: if a recorded command did not come in time, or the engine ran dry where
                the recorded one went on.
        """
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
        """All commands that were queued and not taken; the engine has ended."""
        with self._changed:
            commands = [command for _, command in self._arrived]
            self._arrived.clear()
            return commands

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _find_recorded(self, recorded: deque[tuple[int, str]], step: int, idle: bool) -> int | None:
        """Wait for the next recorded command, if it enters before this step; its place."""
        due_step, due_name = recorded[0] if recorded else (step, STOP)
        if recorded and due_step > step:
            if idle and self._place(STOP) is None:
                raise ReplayError(
                    f"the engine ran dry before its step {step}; the recorded one went on until "
                    f"{due_name} entered before step {due_step}"
                )
            return self._place(STOP)
        if not recorded and not idle:
            return self._place(STOP)

        def come() -> bool:
            return self._place(due_name) is not None or self._place(STOP) is not None

        # After the last command there is no telling how long the run goes on.
        if not self._changed.wait_for(come, self._timeout_s if recorded else None):
            here = ", ".join(name for name, _ in list(self._arrived)[:_SHOWN]) or "nothing"
            raise ReplayError(
                f"the engine waited {self._timeout_s:g} s for {due_name} before its step {step}; "
                f"there is {here}"
            )
        place = self._place(STOP)
        if place is None:
            recorded.popleft()
            place = self._place(due_name)
        return place

    def _place(self, wanted: str) -> int | None:
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
    """Where a generator's schedule lies.

    Args:
        folder: of the run's logs.
        number: of the generator.
    """
    return folder / f"schedule_generator_{number}.jsonl"


def open_schedule(
    number: int, folder: str | None, replayed_folder: str | None, timeout_s: float, life: int = 0
) -> Schedule[Any]:
    """A generator's schedule, to write and maybe to keep.

    Args:
        number: of the generator.
        folder: gets the file; None writes none.
        replayed_folder: has the file of the run to replay; None for a new run.
        timeout_s: longest wait for a recorded command.
        life: of the generator's process, from 0.
    """
    recorded, killed = None, False
    if replayed_folder is not None:
        lives = _read(schedule_file(Path(replayed_folder), number))
        # A process that ended before its engine was built has left nothing.
        recorded, killed = lives.get(life, []), life < max(lives, default=0)
    path = None if folder is None else schedule_file(Path(folder), number)
    if path is not None:
        cut_torn_line(path)
    return Schedule(path, recorded, timeout_s, life=life, killed=killed)


def _read(path: Path) -> dict[int, list[tuple[int, str]]]:
    """(engine step, name) of every command, by life."""
    lives: dict[int, list[tuple[int, str]]] = {}
    entered: list[tuple[int, str]] = []
    with path.open(encoding="utf-8") as lines:
        for line in map(json.loads, lines):
            if "life" in line:
                entered = lives[line["life"]] = []
            else:
                entered += [(line["step"], name) for name in line["entered"]]
    return lives
