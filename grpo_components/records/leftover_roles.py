"""Waits for role processes of a killed driver to exit: they may still write to the run folder."""

from __future__ import annotations

import contextlib
import json
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from grpo_components.errors import fail
from grpo_components.records.folder_lock import TIME, Holder, short

WAIT_S = 30.0
"""Seconds that the roles of a killed driver may take to end."""
_CLOCK_S = 1.0
"""Seconds by which two clocks may differ on the time of one event."""


def wait_for_roles(folder: Path, driver: Holder | None) -> None:
    """Wait until the roles of a dead driver have ended, so that nothing else writes to its folder.

    Ray ends the roles when it notices that the driver is gone.
    """
    if driver is None or not driver.is_here():
        return
    roles = _roles(folder / "logs" / "roles.jsonl", driver)
    _, waited_for = psutil.wait_procs(list(roles), timeout=WAIT_S)
    alive = [process for process in waited_for if _runs(process)]
    if alive:
        role = f"{roles[alive[0]]}, pid {alive[0].pid}"
        run = f"pid {driver.pid}, started {driver.started}"
        problem = f"{short(folder)} is in use by {role}, left by a dead run ({run})"
        fail("output_dir", problem, "another folder, or this one after that process has ended")


def _roles(path: Path, driver: Holder) -> dict[psutil.Process, str]:
    """Return the running processes that the driver recorded as roles, each with its role's name."""
    since = datetime.strptime(driver.started, TIME).timestamp()
    found: dict[psutil.Process, str] = {}
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    for line in lines:
        role, pid, recorded = _record(line)
        if not since - _CLOCK_S <= recorded <= time.time() + _CLOCK_S:
            continue
        try:
            process = psutil.Process(pid)
        except (psutil.NoSuchProcess, ValueError, OverflowError):
            continue
        reused = process.create_time() > recorded + _CLOCK_S
        if _runs(process) and not reused:
            found[process] = role
            with contextlib.suppress(psutil.NoSuchProcess):
                workers = process.children(recursive=True)  # they write to the role's log
                found.update(dict.fromkeys(workers, f"a process of {role}"))
    return found


def _runs(process: psutil.Process) -> bool:
    """Whether a process can still write to files; a zombie cannot."""
    try:
        return process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def _record(line: str) -> tuple[str, int, float]:
    """Return name, pid and start time of a role; time 0 if the line is not a valid record."""
    try:
        record: dict[str, Any] = json.loads(line)
        return str(record["role"]), int(record["pid"]), float(record["started"])
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return "", 0, 0.0
