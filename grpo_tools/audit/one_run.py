"""The `one_run` rule: receipts, configs and checkpoints of a folder belong to one run."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from grpo_tools.audit.lines import UnreadableError, parse
from grpo_tools.json_lines import records_of

Check = Callable[[str, bool, str], Any]
RULE = "one_run"
_HEAD = re.compile(r"# (run|incarnation): ([0-9a-f]{32})\n")
_MAX_VALUE_CHARS = 60


class _RecordedRun:
    """Collects what the receipts say about their run: its ids, processes and steps.

    An incarnation is the random id of a process of the run.
    """

    def __init__(self, records: Iterable[dict[str, Any]]) -> None:
        self.runs: list[Any] = []
        """Run id of each attempt that has one, in order."""
        self.incarnations: list[Any] = []
        """Incarnation of each of these attempts."""
        self.steps: dict[Any, tuple[Any, Any]] = {}
        """Step -> (policy version after it, incarnation that recorded it), without steps that a
        later attempt superseded."""
        self._now: Any = None
        for record in records:
            if record.get("record") == "start":
                self._start(record)
            elif record.get("record") == "step" and isinstance(step := record.get("step"), int):
                self.steps[step] = (record.get("policy_version"), self._now)

    def _start(self, record: dict[str, Any]) -> None:
        done, self._now = record.get("steps_done"), record.get("incarnation")
        if isinstance(done, int):
            self.steps = {s: entry for s, entry in self.steps.items() if _is_at_most(s, done)}
        if "run" in record:
            self.runs.append(record["run"])
            self.incarnations.append(self._now)


def check_one_run(receipts: Path, check: Check) -> None:
    """Check that receipts, configs and checkpoints of a folder belong to one run.

    Older versions of this package wrote no ids: of their runs, only the step and the policy version
    of the latest checkpoint are checked.
    """
    folder = receipts.parent
    # Read before the receipts: a run writes the record of a step before the step's checkpoint.
    latest = folder / "checkpoints" / "latest"
    target = os.readlink(latest) if latest.is_symlink() else None
    saved = {path.name: _saved(path) for path in sorted(folder.glob("checkpoints/step_*"))}
    recorded = _RecordedRun(records_of(receipts))
    run = recorded.runs[0] if recorded.runs else None
    other = next((each for each in recorded.runs if each != run), None)
    check(RULE, other is None, f"the receipts name two runs: {_shown(run)} and {_shown(other)}")
    if run is not None:
        _check_configs(folder, run, recorded, check)
        for name, (identity, _) in saved.items():
            _check_checkpoint(name, identity, run, recorded, check)
    if target is not None:
        _check_latest(target, *saved.get(target, ({}, {})), recorded, check)


def _check_configs(folder: Path, run: Any, recorded: _RecordedRun, check: Check) -> None:
    for path in sorted(folder.glob("config*.yaml")):
        found = _head(path)
        last = path.name == "config.yaml"
        incarnations = recorded.incarnations[-1:] if last else [None, *recorded.incarnations]
        same_run = found.get("run", None if last else run) == run
        problem = f"{path.name} is of run {_shown(found.get('run'))}, incarnation "
        problem += f"{_shown(found.get('incarnation'))}, which no start record has"
        check(RULE, same_run and found.get("incarnation") in incarnations, problem)


def _check_checkpoint(
    name: str, identity: dict[str, Any], run: Any, recorded: _RecordedRun, check: Check
) -> None:
    if not identity:  # an older version wrote the checkpoint, without ids
        return
    other, process = identity.get("run"), identity.get("incarnation")
    check(RULE, other == run, f"{name} is a checkpoint of run {_shown(other)}, not {_shown(run)}")
    problem = f"{name} was written by incarnation {_shown(process)}, which no start record names"
    check(RULE, process in recorded.incarnations, problem)


def _check_latest(
    name: str,
    identity: dict[str, Any],
    ledger: dict[str, Any],
    recorded: _RecordedRun,
    check: Check,
) -> None:
    """Check that `latest`, the checkpoint to resume from, is of a step that was not superseded."""
    step, version, latest = ledger.get("steps_done"), ledger.get("policy_version"), _shown(name)
    after_step = recorded.steps.get(step) if isinstance(step, int) else None
    problem = f"latest is {latest}, but step {_shown(step)} is not among the steps that count"
    if not check(RULE, after_step is not None, problem) or after_step is None:
        return
    problem = f"latest is {latest} with policy version {_shown(version)}; its step ended with "
    check(RULE, version == after_step[0], problem + _shown(after_step[0]))
    process = identity.get("incarnation", after_step[1])
    problem = f"latest is {latest} of incarnation {_shown(process)}, but another recorded its step"
    check(RULE, process == after_step[1], problem)


def _saved(checkpoint: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a checkpoint's ids and its ledger (counts of steps and groups); empty if missing."""
    try:
        text = (checkpoint / "state" / "driver.json").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return {}, {}
    state = _json(text)
    parts = [state.get(key) if isinstance(state, dict) else None for key in ("identity", "ledger")]
    identity, ledger = (part if isinstance(part, dict) else {} for part in parts)
    return identity, ledger


def _head(path: Path) -> dict[str, str]:
    with path.open(encoding="utf-8", errors="replace") as lines:
        found = (_HEAD.fullmatch(lines.readline()) for _ in range(2))
        return {match[1]: match[2] for match in found if match}


def _is_at_most(step: Any, last: int) -> bool:
    return isinstance(step, int) and step <= last


def _json(text: str) -> Any:
    try:
        return parse(text.encode())
    except UnreadableError:
        return None


def _shown(value: Any) -> str:
    """Return a value from a file as short ASCII text."""
    return ascii(value)[:_MAX_VALUE_CHARS].strip("'")
