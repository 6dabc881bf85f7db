"""The `one_run` rule: receipts, configs and checkpoints of a folder belong to one run."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo_tools.json_lines import records_of

Check = Callable[[str, bool, str], Any]
RULE = "one_run"
_HEAD = re.compile(r"# (run|incarnation): ([0-9a-f]{32})\n")


def check_one_run(receipts: Path, check: Check) -> None:
    """Check that receipts, configs and checkpoints of a folder have the same ids.

    A run has one id. An incarnation is the random id of a process of the run.
    """
    folder = receipts.parent
    # Read before the receipts: a run writes the record of a step before the step's checkpoint.
    latest = folder / "checkpoints" / "latest"
    target = os.readlink(latest) if latest.is_symlink() else None
    states = sorted(folder.glob("checkpoints/step_*/state/driver.json"))
    saved = {path.parents[1].name: json.loads(path.read_text()) for path in states}
    runs, incarnations = list[str](), list[str]()
    steps = dict[int, tuple[int, str]]()  # without steps that a later attempt superseded
    for record in records_of(receipts):
        if record["event"] == "start":
            if record.get("run") is None:  # of a test
                return
            runs.append(record["run"])
            incarnations.append(record["incarnation"])
            steps = {step: each for step, each in steps.items() if step <= record["steps_done"]}
        elif record["event"] == "step":
            steps[record["step"]] = (record["policy_version"], incarnations[-1])
    run = runs[0]
    other = next((each for each in runs if each != run), None)
    check(RULE, other is None, f"the receipts name two runs: {run} and {other}")
    for path in sorted(folder.glob("config*.yaml")):
        head = _head(path)
        allowed = incarnations[-1:] if path.name == "config.yaml" else incarnations
        same_run = head.get("run") == run and head.get("incarnation") in allowed
        check(RULE, same_run, f"{path.name} is of {head}, which no start record has")
    for name, state in saved.items():
        identity = state["identity"]
        known = identity["run"] == run and identity["incarnation"] in incarnations
        check(RULE, known, f"{name} is a checkpoint of {identity}, which no start record names")
    if target is None:
        return
    ledger = saved[target]["ledger"] if target in saved else {}
    step = steps.get(ledger.get("steps_done", -1))
    if check(RULE, step is not None, f"latest is {target}, which is of no step that counts"):
        assert step is not None
        stated = ledger["policy_version"], saved[target]["identity"]["incarnation"]
        check(RULE, stated == step, f"latest is {target} with {stated}, but its step has {step}")


def _head(path: Path) -> dict[str, str]:
    """Return the ids in the first two lines of a config."""
    with path.open(encoding="utf-8") as lines:
        found = (_HEAD.fullmatch(lines.readline()) for _ in range(2))
        return {match[1]: match[2] for match in found if match}
