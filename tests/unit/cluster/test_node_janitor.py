"""A node that left the cluster keeps nothing of a run; one that is in it keeps all."""

import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from grpo_components.cluster.node_janitor import LOCK, end_janitor, wait_and_remove
from grpo_components.cluster.node_side import RUN_VARIABLE, open_run_folder

WAIT_S = 30
RAYLET = """
import ctypes, subprocess, sys
ctypes.CDLL(None).prctl(15, b"raylet", 0, 0, 0)  # the name of this process
role = subprocess.Popen([sys.executable, "-c", sys.argv[1], *sys.argv[2:]], stdin=subprocess.PIPE)
sys.stdin.read()
"""
ROLE = """
import sys
from pathlib import Path
from grpo_components.cluster.node_side import open_run_folder, open_scratch
scratch, output_dir = sys.argv[1:]
open_run_folder(output_dir, ".marker", Path(scratch).name)
open_scratch(Path(scratch), output_dir)
open_scratch(Path(scratch), output_dir)  # as another role would
print((Path(scratch) / "janitor").read_text(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def node(tmp_path):
    """A raylet with a role of a run; returns the raylet, the janitor and the run's folders."""
    scratch, output_dir = tmp_path / "grpo-job-1", tmp_path / "run"
    with subprocess.Popen(
        [sys.executable, "-c", RAYLET, ROLE, str(scratch), str(output_dir)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, RUN_VARIABLE: "grpo-job-1"},
    ) as raylet:
        janitor = psutil.Process(int(raylet.stdout.readline()))
        yield raylet, janitor, scratch, output_dir
        raylet.kill()
    janitor.wait(WAIT_S)


def test_a_node_whose_raylet_ended_keeps_nothing(node):
    raylet, janitor, scratch, output_dir = node
    assert RUN_VARIABLE not in janitor.environ() and janitor.ppid() != raylet.pid
    raylet.kill()
    janitor.wait(WAIT_S)
    assert not scratch.exists() and not output_dir.exists()


def test_a_run_that_ends_its_janitor_has_one_no_longer_and_its_files_are_its_own_business(node):
    _, janitor, scratch, output_dir = node
    end_janitor(scratch)
    janitor.wait(WAIT_S)
    end_janitor(scratch)
    assert scratch.exists() and (output_dir / "logs").exists()


@pytest.fixture
def places(tmp_path):
    scratch, output_dir = tmp_path / "grpo-job-1", tmp_path / "run"
    scratch.mkdir()
    (scratch / LOCK).touch()
    open_run_folder(str(output_dir), ".marker", scratch.name)
    return scratch, output_dir


@pytest.fixture
def ended_pid():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_roles_that_outlive_the_raylet_keep_their_files(places, ended_pid):
    scratch, output_dir = places
    with (scratch / LOCK).open("rb") as role:
        fcntl.flock(role, fcntl.LOCK_SH)
        janitor = threading.Thread(target=wait_and_remove, args=(ended_pid, scratch, output_dir))
        janitor.start()
        janitor.join(0.2)
        assert janitor.is_alive() and scratch.exists() and output_dir.exists()
    janitor.join(WAIT_S)
    assert not scratch.exists() and not output_dir.exists()


def test_a_run_without_roles_for_long_has_left_a_living_node(places):
    scratch, output_dir = places
    wait_and_remove(os.getpid(), scratch, output_dir, gone_s=0.01)
    assert not scratch.exists() and not output_dir.exists()


@pytest.mark.parametrize("what", ["shared", "of another run"])
def test_a_folder_that_is_no_part_of_this_run_stays(places, ended_pid, what):
    scratch, output_dir = places
    mirror = output_dir / ".copy-of-a-run"
    mirror.unlink() if what == "shared" else mirror.write_text("grpo-job-2")
    wait_and_remove(ended_pid, scratch, output_dir)
    assert not scratch.exists() and Path(output_dir, "logs").exists()


def test_a_run_that_cleaned_up_leaves_nothing_to_do(tmp_path):
    wait_and_remove(os.getpid(), tmp_path / "gone", tmp_path / "run")
