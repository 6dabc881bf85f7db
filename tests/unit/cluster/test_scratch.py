"""What a killed run left behind is removed by the next one; what belongs to others stays."""

import os
import subprocess
import sys

import pytest

from grpo_components.cluster.scratch import make_scratch, remove_scratch, sweep

KILLED = """
import os, sys
from pathlib import Path
from grpo_components.cluster.scratch import make_scratch
folder, lock = make_scratch(Path(sys.argv[1]))
sys.stdout.write(folder.name)
sys.stdout.flush()
os.kill(os.getpid(), 9)
"""


@pytest.fixture
def places(tmp_path):
    """Stand-ins for /tmp and /dev/shm."""
    found = tmp_path / "tmp", tmp_path / "shm"
    for folder in found:
        folder.mkdir()
    return found


def fill(folder, shared_memory):
    """Leave what Ray, semaphores of roles and vLLM's workers leave, and what others leave."""
    (folder / "session_1" / "sockets").mkdir(parents=True)
    (folder / "session_1" / "sockets" / "raylet").touch()
    (folder / "vllm_dist_a1").touch()  # vLLM's workers meet through it, and name their memory so
    ours = [f"sem.{folder.name}-abcdefg0", "vllm_dist_a1-tp:0-[0-1]-cpushm_0"]
    for name in [*ours, "vllm_dist_a", "sem.mp-1"]:
        (shared_memory / name).touch()


def test_what_a_killed_run_left_is_removed_and_what_others_have_stays(places):
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(places[0])], capture_output=True, text=True
    )
    living, lock = make_scratch(places[0])
    (places[0] / "grpo-notes").mkdir()
    (places[0] / "grpo-notes" / "mine").touch()
    fill(places[0] / killed.stdout, places[1])
    assert sweep(*places) == [killed.stdout] and sweep(*places) == []
    assert {path.name for path in places[0].iterdir()} == {living.name, "grpo-notes"}
    assert {path.name for path in places[1].iterdir()} == {"vllm_dist_a", "sem.mp-1"}
    remove_scratch(living, places[1])
    lock.close()
    assert [path.name for path in places[0].iterdir()] == ["grpo-notes"]


def test_folders_of_other_users_stay(places, monkeypatch):
    folder, lock = make_scratch(places[0])
    lock.close()
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    assert sweep(*places) == [] and folder.exists()


def test_the_folders_path_leaves_room_for_rays_sockets():
    folder, lock = make_scratch()
    longest = "session_2026-11-22_11-20-36_123456_4194304/sockets/plasma_store"
    room = len("4194304") - len(str(os.getpid()))
    remove_scratch(folder)
    lock.close()
    assert len(f"{folder}/{longest}") + room <= 107
