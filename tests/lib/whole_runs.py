"""What tests of whole runs share: ends a run, and reads what it wrote."""

import contextlib
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from grpo_components.audit.__main__ import main as audit_main
from lib.chaos import RECIPE, TUNE

__all__ = ["RECIPE", "TUNE"]
SHORT = ("num_steps=4", "groups_per_step=4", "group_size=4", "eval_dataset.num_rows=16")


def temporary_files(pid):
    return [*Path("/tmp").glob(f"grpo-{pid}-*"), *Path("/dev/shm").glob(f"sem.grpo-{pid}-*")]


def finish(process, timeout_s=1500):
    output, _ = process.communicate(timeout=timeout_s)
    return process.returncode, output


def succeed(tune, *overrides, **kwargs):
    process, output_dir = tune(*overrides, **kwargs)
    code, output = finish(process)
    assert code == 0, output
    assert not re.search("^warning: ", output, re.MULTILINE), output  # no false alarm
    return output, output_dir


def records(path):
    return [json.loads(line) for line in path.open()]


def audit(output_dir):
    """Exit code and output of the audit of a run's receipts."""
    command = [sys.executable, "-m", "grpo_components.audit", str(output_dir)]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def rescore(output_dir):
    """Exit code and output of the audit that scores all tokens again, in this process."""
    output, threads = io.StringIO(), torch.get_num_threads()
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = audit_main([str(output_dir), "--rescore"])
    torch.set_num_threads(threads)
    return code, output.getvalue()


def metrics(output_dir):
    return records(output_dir / "logs" / "metrics.jsonl")


def receipts(output_dir):
    """The records of its steps."""
    return [r for r in records(output_dir / "receipts.jsonl") if r["record"] == "step"]


def wait_for_line(process, pattern=r"step +2/"):
    """Read what a run prints until a line that begins so."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if re.match(pattern, line):
            return
    raise AssertionError("the run ended early:\n" + "".join(lines))


def rollouts(output_dir):
    """The sampled groups, without the forks of sessions, which depend on the order of arrival."""
    groups = records(output_dir / "logs" / "rollouts.jsonl")
    for response in (response for group in groups for response in group["responses"]):
        (response.get("session") or {}).pop("forks", None)
    return groups


def assert_same_run(original, replay, num_steps):
    """Responses, batches and last weights, to the bit; returns the weights."""
    assert rollouts(replay) == rollouts(original)
    hashes = [
        [r["batch_hash"] for r in records(folder / "receipts.jsonl") if "batch_hash" in r]
        for folder in (original, replay)
    ]
    assert len(hashes[0]) == num_steps and hashes[0] == hashes[1]
    before, after = (
        load_file(folder / "checkpoints" / f"step_{num_steps}" / "model.safetensors")
        for folder in (original, replay)
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    return after
