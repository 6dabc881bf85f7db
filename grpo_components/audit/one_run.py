"""The audit of what lies beside the receipts: whether all of it is of one run, life by life."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from grpo_components.audit.lines import UnreadableError, parse, records_of

Check = Callable[[str, bool, str], Any]
RULE = "one_run"
_HEAD = re.compile(r"# (run|incarnation): ([0-9a-f]{32})\n")
_MAX_CHARS = 60


class _Lives:
    """What the receipts say of a run's processes and steps."""

    def __init__(self, records: Iterable[dict[str, Any]]) -> None:
        self.runs: list[Any] = []
        """Of all attempts that name one, in their order."""
        self.incarnations: list[Any] = []
        self.steps: dict[Any, tuple[Any, Any]] = {}
        """The policy version that a step left and the process that recorded it, by step: those of
        the last attempt, whose later steps are not superseded."""
        self._now: Any = None
        for record in records:
            if record.get("record") == "start":
                self._start(record)
            elif record.get("record") == "step" and isinstance(step := record.get("step"), int):
                self.steps[step] = (record.get("policy_version"), self._now)

    def _start(self, record: dict[str, Any]) -> None:
        done, self._now = record.get("steps_done"), record.get("incarnation")
        if isinstance(done, int):
            self.steps = {s: left for s, left in self.steps.items() if _is_at_most(s, done)}
        if "run" in record:
            self.runs.append(record["run"])
            self.incarnations.append(self._now)


def check_one_run(receipts: Path, check: Check) -> None:
    """Check that receipts, configs and checkpoints of a folder are of one run.

    Records and checkpoints from before runs had ids are compared by step and version only.

    Args:
        receipts: path of receipts.jsonl; what lies beside it is checked, too.
        check: told the rule, whether it holds, and what is wrong where it does not.
    """
    folder = receipts.parent
    # Before the receipts: a run that goes on writes the receipt of a step before its checkpoint.
    latest = folder / "checkpoints" / "latest"
    target = os.readlink(latest) if latest.is_symlink() else None
    saved = {path.name: _saved(path) for path in sorted(folder.glob("checkpoints/step_*"))}
    lives = _Lives(records_of(receipts))
    run = lives.runs[0] if lives.runs else None
    other = next((each for each in lives.runs if each != run), None)
    check(RULE, other is None, f"receipts of run {_shown(other)} among those of {_shown(run)}")
    if run is not None:
        _check_configs(folder, run, lives, check)
        for name, (identity, _) in saved.items():
            _check_checkpoint(name, identity, run, lives, check)
    if target is not None:
        _check_latest(target, *saved.get(target, ({}, {})), lives, check)


def _check_configs(folder: Path, run: Any, lives: _Lives, check: Check) -> None:
    for path in sorted(folder.glob("config*.yaml")):
        found = _head(path)
        last = path.name == "config.yaml"
        incarnations = lives.incarnations[-1:] if last else [None, *lives.incarnations]
        own = found.get("run", None if last else run) == run
        problem = f"{path.name} is of run {_shown(found.get('run'))}, incarnation "
        problem += f"{_shown(found.get('incarnation'))}, and no start record says so"
        check(RULE, own and found.get("incarnation") in incarnations, problem)


def _check_checkpoint(
    name: str, identity: dict[str, Any], run: Any, lives: _Lives, check: Check
) -> None:
    if not identity:  # from before runs had ids
        return
    other, process = identity.get("run"), identity.get("incarnation")
    check(RULE, other == run, f"{name} is a checkpoint of run {_shown(other)}, not {_shown(run)}")
    problem = f"{name} was written by incarnation {_shown(process)}, which no start record names"
    check(RULE, process in lives.incarnations, problem)


def _check_latest(
    name: str, identity: dict[str, Any], ledger: dict[str, Any], lives: _Lives, check: Check
) -> None:
    """What a run would resume from has to be of the steps that count."""
    step, version, latest = ledger.get("steps_done"), ledger.get("policy_version"), _shown(name)
    recorded = lives.steps.get(step) if isinstance(step, int) else None
    problem = f"latest is {latest}, and the last attempt has not done step {_shown(step)}"
    if not check(RULE, recorded is not None, problem) or recorded is None:
        return
    problem = f"latest is {latest}, of policy version {_shown(version)}; its step left "
    check(RULE, version == recorded[0], problem + _shown(recorded[0]))
    process = identity.get("incarnation", recorded[1])
    problem = f"latest is {latest}, of incarnation {_shown(process)}, and another recorded its step"
    check(RULE, process == recorded[1], problem)


def _saved(checkpoint: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Identity and ledger in a checkpoint's state, empty where there are none."""
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
    """A value of a file, safe to show."""
    return ascii(value)[:_MAX_CHARS].strip("'")
