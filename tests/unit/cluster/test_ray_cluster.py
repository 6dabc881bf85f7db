"""What is said when roles do not fit, and what is found and removed on a node."""

import os
import subprocess
import sys

import psutil
import pytest

from grpo_components.cluster import ray_cluster
from grpo_components.cluster.ray_cluster import (
    Need,
    check_room,
    make_scratch,
    remove_scratch,
    sweep,
)
from grpo_components.cluster.role_host import network_environment
from grpo_components.errors import ConfigError

GPUS, MANY_CPUS = {"GPU": 1}, {"CPU": 9}


@pytest.mark.parametrize(
    ("needs", "key"),
    [
        ({"generator": Need(1, {"GPU": 4}, "SPREAD")}, "gpus_per_generator"),
        ({"trainer": Need(1, MANY_CPUS, "PACK")}, "cpu_threads.trainer"),
        ({"trainer": Need(4, GPUS, "PACK", together=4)}, "gpus_per_trainer"),
        ({"trainer": Need(3, GPUS, "PACK"), "generator": Need(2, GPUS, "SPREAD")}, "ray.address"),
    ],
)
def test_a_cluster_that_is_too_small_is_refused_with_the_key_to_change(needs, key):
    nodes = [{"GPU": 2, "CPU": 8}, {"GPU": 2, "CPU": 8}]
    with pytest.raises(ConfigError) as refused:
        check_room(needs, nodes)
    assert refused.value.key == key
    check_room({"trainer": Need(4, GPUS, "PACK")}, nodes)
    check_room({"trainer": Need(4, GPUS, "PACK", together=2)}, nodes)


def test_a_node_sees_a_file_of_a_folder_that_it_has(tmp_path):
    (tmp_path / "marker").touch()
    seen = [ray_cluster._look(str(tmp_path / name))[1] for name in ("marker", "no", "no/marker")]
    assert seen == [True, False, False]


def test_all_processes_of_a_run_and_its_folder_are_removed_and_no_others(tmp_path, monkeypatch):
    monkeypatch.setattr(ray_cluster, "_END_S", 0.5)
    code = "import time; print(1, flush=True); time.sleep(60)"
    folders = [tmp_path / "one", tmp_path / "other"]
    started = []
    for folder in folders:
        folder.mkdir()
        environment = {**os.environ, "TMPDIR": str(folder)}
        command = [sys.executable, "-c", code]
        started.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE))
        started[-1].stdout.readline()
    ray_cluster._clear(str(folders[0]))
    assert not psutil.pid_exists(started[0].pid) and started[1].poll() is None
    assert [folder.exists() for folder in folders] == [False, True]
    started[1].kill()
    started[1].wait(10)


def test_libraries_use_the_interface_that_has_the_address_of_ray():
    assert network_environment("127.0.0.1")["GLOO_SOCKET_IFNAME"] == "lo"
    assert network_environment("192.0.2.1") == {}


KILLED = """
import os, sys
from pathlib import Path
from grpo_components.cluster.ray_cluster import make_scratch
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


def test_what_a_killed_run_left_is_removed_and_what_others_have_stays(places):
    """What Ray, semaphores of roles and vLLM's workers left."""
    folders, shared_memory = places
    command = [sys.executable, "-c", KILLED, folders]
    killed = subprocess.run(command, capture_output=True, text=True).stdout
    living, lock = make_scratch(folders)
    # vLLM's workers meet through a file, and name their memory so.
    for left in (f"{killed}/session_1/sockets/raylet", f"{killed}/vllm_dist_a1", "grpo-notes/mine"):
        (folders / left).parent.mkdir(parents=True, exist_ok=True)
        (folders / left).touch()
    ours = [f"sem.{killed}-abcdefg0", "vllm_dist_a1-tp:0-[0-1]-cpushm_0"]
    for name in [*ours, "vllm_dist_a", "sem.mp-1"]:
        (shared_memory / name).touch()
    assert sweep(*places) == [killed] and sweep(*places) == []
    assert {path.name for path in folders.iterdir()} == {living.name, "grpo-notes"}
    assert {path.name for path in shared_memory.iterdir()} == {"vllm_dist_a", "sem.mp-1"}
    remove_scratch(living, shared_memory)
    lock.close()
    assert [path.name for path in folders.iterdir()] == ["grpo-notes"]


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
