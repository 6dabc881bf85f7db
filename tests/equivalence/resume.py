"""The rung of the equivalence ladder that kills and resumes a run."""

from __future__ import annotations

import contextlib
import math
import re
import shutil
import subprocess
from pathlib import Path

import psutil

from equivalence.rungs import (
    Bench,
    batch_hashes,
    max_difference,
    run,
    saved_weights,
)
from grpo_components.records.resume import last_attempt
from grpo_tools.audit.__main__ import audit

_SAVING = ("save_every_n_steps=1", "async_checkpoint=true", "keep_last_n=2")
_EXIT_TIMEOUT_S = 5.0
"""Seconds that the child processes of a killed run have to end before they are killed."""


def resumed_is_uninterrupted(bench: Bench) -> float:
    """Compare batches and final weights of a killed, resumed run with an uninterrupted run's.

    The run is killed after its first checkpoint. The audit must pass over both of its attempts.
    """
    return _compare(bench, bench.synchronous_run(0))


def resumed_is_uninterrupted_by_transformers(bench: Bench) -> float:
    """As `resumed_is_uninterrupted`, with the tiny policy as a model of transformers."""
    sizes = [f"~model.{key}" for key in bench.cfg.model if key != "_component_"]
    policy = ("model._component_=grpo_components.models.hugging_face", "checkpointer=null")
    path = f"model.path={bench.cfg.base_model_path}"
    whole, overrides = bench.folder() / "run", (*policy, path, *sizes)
    run(bench.command(whole, *overrides))
    return _compare(bench, whole, *overrides)


def _compare(bench: Bench, whole: Path, *overrides: str) -> float:
    """Kill and resume a run; return how far its weights are from those of an uninterrupted one."""
    resumed, overrides = bench.folder() / "run", (*overrides, *_SAVING)
    run_and_kill(bench.command(resumed, *overrides), "step 1: saved")
    run(bench.command(resumed, *overrides, "resume_from_checkpoint=true"))
    findings, _ = audit(resumed / "receipts.jsonl")
    if findings.broken or last_attempt(resumed) != 1:
        return math.inf
    if not batch_hashes(whole) or batch_hashes(whole) != batch_hashes(resumed):
        return math.inf
    latest = "checkpoints/latest"
    return max_difference(saved_weights(whole / latest), saved_weights(resumed / latest))


def run_and_kill(command: list[str], words: str) -> None:
    """Run a command until it prints some words, then kill it with SIGKILL and clean up after it."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        output, children, folders = [], [], set[str]()
        try:
            for line in process.stdout:
                output.append(line)
                if words in line:
                    break
            else:
                raise RuntimeError(f"{' '.join(command)} ended early:\n{''.join(output)}")
            children = psutil.Process(process.pid).children(recursive=True)
            for child in children:
                with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    folders |= set(re.findall(r"/tmp/(grpo-\d+-\w+)", " ".join(child.cmdline())))
        finally:
            process.kill()
            _, alive = psutil.wait_procs(children, timeout=_EXIT_TIMEOUT_S)
            for child in alive:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            for name in folders:
                shutil.rmtree(f"/tmp/{name}", ignore_errors=True)
                for semaphore in Path("/dev/shm").glob(f"sem.{name}-*"):
                    semaphore.unlink(missing_ok=True)
