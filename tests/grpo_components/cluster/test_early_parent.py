"""The parent that starts with the command is used once, or ends; nothing of it stays."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from grpo_components.cluster import early_parent

CORES = len(os.sched_getaffinity(0))
LIKELY = {"OMP_NUM_THREADS": str(max(1, CORES // 2)), "OMP_WAIT_POLICY": "PASSIVE"}
BEGIN = """
import sys
from grpo_components.cluster import early_parent

early_parent.EARLY = ()
early_parent.begin()
[(_, parent, folder)] = early_parent._started
print(parent.pid, folder, flush=True)
"""


@pytest.fixture
def begun(monkeypatch):
    monkeypatch.setattr(early_parent, "EARLY", ())
    early_parent.begin()
    yield
    early_parent.stop()


def test_it_is_taken_once(begun):
    parent = early_parent.take(LIKELY)
    assert parent is not None and parent.lives()
    assert early_parent.take(LIKELY) is None and parent.lives()
    parent.stop()


@pytest.mark.parametrize("changed", [{"OMP_NUM_THREADS": "99"}, {"OMP_WAIT_POLICY": "ACTIVE"}])
def test_with_other_settings_it_ends(begun, changed):
    [child] = [p for p in psutil.Process().children() if "role_parent" in " ".join(p.cmdline())]
    assert early_parent.take(LIKELY | changed) is None
    assert not child.is_running()


@pytest.mark.parametrize(
    "end", ["", "sys.exit(2)", "early_parent.stop()", "early_parent.take(parent and {})"]
)
def test_nothing_stays_after_the_process(end):
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + end], capture_output=True, text=True, timeout=60
    )
    pid, folder = done.stdout.split()
    assert not psutil.pid_exists(int(pid)) and not Path(folder).exists(), done.stderr
