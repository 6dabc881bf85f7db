"""`make gpu-test` on a CPU: all that needs no GPU passes, and nothing of it is left."""

import importlib.util
import os
import subprocess
import sys
import uuid
from pathlib import Path

import psutil
import pytest
from lib.tune import processes_of

SCRIPT = Path(__file__).parents[1] / "gpu" / "smoke.py"


@pytest.fixture
def smoke():
    spec = importlib.util.spec_from_file_location("smoke", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_passes_on_a_cpu(tiny_policy):
    done = subprocess.run([sys.executable, SCRIPT, "--on-cpu"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    head, _, *rows = done.stdout.splitlines()
    assert head == "| check | | seconds | |"
    assert len(rows) > 5 and all("| passed |" in row for row in rows)


def test_a_check_that_takes_too_long_leaves_no_process(smoke, tiny_policy, monkeypatch):
    mark = uuid.uuid4().hex
    monkeypatch.setenv("GRPO_TEST", mark)  # its children have it, too
    name = next(name for name in smoke.CHECKS if "tiny_async_grpo" in name)
    ok, text = smoke.in_a_process(name, ["--on-cpu"], 20.0)  # Ray has started
    assert (ok, text) == (False, "not done after 20 s")
    left = [each for each in processes_of(mark) if each.pid != os.getpid()]
    _, left = psutil.wait_procs(left, timeout=10)
    assert left == []
