"""What the user reads when roles do not fit, and what is found and removed on a node."""

import os
import subprocess
import sys

import psutil
import pytest

from grpo_components.cluster import ray_cluster
from grpo_components.cluster.ray_cluster import Need, check_room, family_of
from grpo_components.cluster.role_host import network_environment
from grpo_components.errors import ConfigError

GPUS, MANY_CPUS = {"GPU": 1}, {"CPU": 9}


@pytest.mark.parametrize(
    ("needs", "key"),
    [
        ({"generator": Need(1, {"GPU": 4}, "SPREAD")}, "gpus_per_generator"),
        ({"trainer": Need(1, MANY_CPUS, "PACK")}, "cpu_threads.trainer"),
        ({"trainer": Need(4, GPUS, "PACK", together=4)}, "gpus_per_trainer"),
        (
            {"trainer": Need(3, GPUS, "PACK"), "generator": Need(2, GPUS, "SPREAD")},
            "ray.address",
        ),
    ],
)
def test_a_cluster_that_is_too_small_is_refused_with_the_key_to_change(needs, key):
    nodes = [{"GPU": 2, "CPU": 8}, {"GPU": 2, "CPU": 8}]
    with pytest.raises(ConfigError) as refused:
        check_room(needs, nodes)
    assert refused.value.key == key
    check_room({"trainer": Need(4, GPUS, "PACK")}, nodes)
    check_room({"trainer": Need(4, GPUS, "PACK", together=2)}, nodes)


def test_a_family_is_the_name_without_its_number():
    names = ("trainer_0", "generator_12", "reward_model", "replay_buffer")
    assert [family_of(name) for name in names] == ["trainer", "generator", *names[2:]]


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
