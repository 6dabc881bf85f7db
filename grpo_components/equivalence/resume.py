"""The rung of the equivalence ladder that kills a run and resumes it."""

from __future__ import annotations

import contextlib
import math
import re
import shutil
import subprocess
from pathlib import Path

import psutil

from grpo_components.audit.__main__ import audit
from grpo_components.equivalence.rungs import (
    Bench,
    batch_hashes,
    largest_difference,
    run,
    saved_weights,
    synchronous_command,
)
from grpo_components.records.resume import last_attempt

_SAVING = ("save_every_n_steps=1", "async_checkpoint=true", "keep_last_n=2")
_GONE_S = 5.0
"""How long a killed run's processes may take to follow it, before they are killed, too."""


def resumed_is_uninterrupted(bench: Bench) -> float:
    """A run of the recipe killed after its first checkpoint and resumed, and one that was left
    alone: batches and last weights; the audit holds over both attempts."""
    whole, resumed = bench.synchronous_run(0), bench.folder() / "run"
    run_and_kill(synchronous_command(resumed, *_SAVING), "step 1: saved")
    run(synchronous_command(resumed, *_SAVING, "resume_from_checkpoint=true"))
    report, _ = audit(resumed / "receipts.jsonl")
    if report.broken or last_attempt(resumed) != 1:
        return math.inf
    if not batch_hashes(whole) or batch_hashes(whole) != batch_hashes(resumed):
        return math.inf
    latest = "checkpoints/latest"
    return largest_difference(saved_weights(whole / latest), saved_weights(resumed / latest))


def run_and_kill(command: list[str], words: str) -> None:
    """Run a command until it says something, kill it with SIGKILL, and remove what it left.

    Args:
        command: of a run of the recipe.
        words: in a line of its output.

    Raises:
        RuntimeError: with what it said, if it ends without these words.
    """
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        said, children, folders = [], [], set[str]()
        try:
            for line in process.stdout:
                said.append(line)
                if words in line:
                    break
            else:
                raise RuntimeError(f"{' '.join(command)} ended early:\n{''.join(said)}")
            children = psutil.Process(process.pid).children(recursive=True)
            for child in children:
                with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    folders |= set(re.findall(r"/tmp/(grpo-\d+-\w+)", " ".join(child.cmdline())))
        finally:
            process.kill()
            _, alive = psutil.wait_procs(children, timeout=_GONE_S)
            for child in alive:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            for name in folders:
                shutil.rmtree(f"/tmp/{name}", ignore_errors=True)
                for semaphore in Path("/dev/shm").glob(f"sem.{name}-*"):
                    semaphore.unlink(missing_ok=True)
