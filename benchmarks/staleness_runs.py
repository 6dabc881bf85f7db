"""Makes one run of the staleness atlas: a forked `tune run`, its audit, and its line of results."""

from __future__ import annotations

import atexit
import ctypes
import json
import multiprocessing
import os
import runpy
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from importlib import import_module
from io import StringIO
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
from staleness_lines import Cell, Line

from grpo_components.plain_text import one_line, shortened
from grpo_tools.audit.__main__ import main as audit

RECIPE = "async_grpo_full_finetune_distributed"
TIME_LIMIT_S = 900.0
_KEPT = "receipts.jsonl", "receipts.end", "config.yaml", "logs/metrics.jsonl"
_PRELOADED = "torchtune._cli.tune", "grpo_components.config.objective"
"""None of them may import Ray, which reads its settings from the environment only once."""
_NO_THREAD = {"JE_ARROW_MALLOC_CONF": "background_thread:false", "OPENBLAS_NUM_THREADS": "1"}
"""Keeps pyarrow's allocator and numpy from starting threads when they are imported."""
_PDEATHSIG, _SUBREAPER = 1, 36
_SAMPLED_EVERY_S, _ORPHANS_S, _END_S, _TEXT = 0.5, 20.0, 60.0, 160
_FULL = "the machine's memory was full"
_FORKED = multiprocessing.get_context("fork")


class Interrupted(Exception):
    """The run ended by a signal or a wrong config: that is no result of its cell."""


class NoResultError(Exception):
    """The run failed because the machine's memory was full: that is no result of its cell."""


def preload() -> None:
    """Import what every run imports first, once, so that runs can be forked.

    A process that loses its parent becomes a child of this one: its CPU time is counted.
    """
    before = dict(os.environ)
    os.environ.update(_NO_THREAD)
    for name in _PRELOADED:
        import_module(name)
    for name in _NO_THREAD:
        del os.environ[name]
    os.environ.update({name: before[name] for name in _NO_THREAD if name in before})
    ctypes.CDLL(None).prctl(_SUBREAPER, 1)


def run(cell: Cell, folder: Path, extra: Sequence[str] = ()) -> Line:
    """Run a cell, audit it, keep what audit and page read, and return its result."""
    shutil.rmtree(folder, ignore_errors=True)
    log = folder.parent / f"{folder.name}.log"
    code, cpu_s = _tune([*cell.overrides, *extra, f"output_dir={folder}"], log)
    said = log.read_text(errors="replace").splitlines()
    if code is not None and (code < 0 or code in (2, 129, 130, 143)):
        raise Interrupted("\n".join([*said[-20:], f"{folder.name}: exit code {code}"]))
    if code and any(_FULL in text for text in said):
        raise NoResultError(_FULL)
    ended = "" if code == 0 else _cause(said) if code else f"not done in {TIME_LIMIT_S:.0f} s"
    line = line_of(cell, _records(folder), ended, audit_of(folder, bool(ended)), cpu_s)
    _trim(folder)
    return line


def _tune(overrides: list[str], log: Path) -> tuple[int | None, float]:
    """Return the exit code of a run (None if its time limit ended it) and its CPU seconds."""
    process = _FORKED.Process(target=_become, args=(overrides, str(log), os.getpid()))
    process.start()
    used: dict[tuple[int, float], float] = {}
    end = time.monotonic() + TIME_LIMIT_S
    try:
        while process.exitcode is None and time.monotonic() < end:
            _sample(used)
            process.join(_SAMPLED_EVERY_S)
    except KeyboardInterrupt:  # a terminal sends it to the run as well
        process.join(_END_S)
        raise
    code = process.exitcode
    if code is None:
        _end(process)
    _reap()
    return code, sum(used.values())


def _sample(used: dict[tuple[int, float], float]) -> None:
    """Note the CPU seconds of each process of the run."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            used[process.pid, process.create_time()] = times.user + times.system


def _end(process: BaseProcess) -> None:
    process.terminate()
    process.join(_END_S)
    process.kill()
    process.join()


def _reap() -> None:
    """Wait for the orphans of a run."""
    end = time.monotonic() + _ORPHANS_S
    with suppress(ChildProcessError):
        while time.monotonic() < end:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.05)


def _become(overrides: list[str], log: str, parent: int) -> None:
    """Run `tune run` in this process, as its own interpreter would."""
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        return
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for number in (1, 2):
        os.dup2(descriptor, number)
    here, tune = str(Path(__file__).parent), Path(sys.executable).parent / "tune"
    for name, module in list(sys.modules.items()):  # a run saves what is imported from elsewhere
        if str(getattr(module, "__file__", None) or "").startswith(here):
            del sys.modules[name]
    sys.path[:] = [str(tune.parent), *(path for path in sys.path if path != here)]
    sys.argv = [str(tune), "run", RECIPE, "--config", "tiny_async_grpo", *overrides]
    try:
        runpy.run_path(str(tune), run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves them out


def _cause(said: Sequence[str]) -> str:
    """Return the last line of a failed run's output that names an error."""
    named = [line for line in said if "error" in line.lower()]
    return shortened(one_line((named or list(said) or ["no output"])[-1]), _TEXT)


def audit_of(folder: Path, unfinished: bool) -> str:
    """Return what the audit of a run says of a broken rule; empty if every rule holds."""
    output = StringIO()
    with redirect_stdout(output), redirect_stderr(output):
        code = audit([str(folder), *(["--unfinished"] if unfinished else [])])
    said = output.getvalue().strip().splitlines()
    return shortened(one_line(said[-1]), _TEXT) if code else ""


def _records(folder: Path) -> list[dict[str, Any]]:
    file = folder / "logs" / "metrics.jsonl"
    text = file.read_text() if file.exists() else ""
    whole = text[: text.rfind("\n") + 1]  # a run that was killed may have left a part of a line
    return [json.loads(line) for line in whole.splitlines()]


def line_of(
    cell: Cell, records: Sequence[dict[str, Any]], ended: str, audited: str, cpu_s: float
) -> Line:
    """Return the result of a run."""
    # Steps that were rolled back are there once for each attempt: the last one counts.
    steps = list({record["step"]: record for record in records if record["step"]}.values())
    success = _values("eval/success_rate", records)
    last = steps[-1] if steps else {}
    oldest = _values("staleness/max", steps)
    return Line(
        *(cell.objective, cell.max_staleness, cell.rate, cell.seed, cell.job),
        steps=len(steps),
        before=round(success[0], 4) if success else None,
        after=round(success[-1], 4) if len(success) > 1 and not ended else None,
        reward=_mean("rollout/reward_mean", steps[-5:], 4),
        staleness=_mean("staleness/mean", steps, 3),
        oldest=int(max(oldest)) if oldest else None,
        clipped=_mean("ratio/clip_fraction", steps, 5),
        sample_size=_mean("mismatch/effective_sample_size", steps, 4),
        skipped=last.get("skipped_steps"),
        dropped=last.get("buffer/dropped_stale"),
        restarts=last.get("restarts"),
        **{"cpu_s": round(cpu_s, 1), "ended": ended, "audit": audited},
    )


def _values(name: str, records: Iterable[dict[str, Any]]) -> list[float]:
    return [record[name] for record in records if record.get(name) is not None]


def _mean(name: str, records: Sequence[dict[str, Any]], digits: int) -> float | None:
    values = _values(name, records)
    return round(statistics.fmean(values), digits) if values else None


def _trim(folder: Path) -> None:
    """Remove all but what audit and page read."""
    kept = {folder / name for name in _KEPT}
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir() and not path.is_symlink():
            with suppress(OSError):  # not empty
                path.rmdir()
        elif path not in kept:
            path.unlink()
