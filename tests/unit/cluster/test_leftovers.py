"""What a killed run left behind is removed by the next one; what belongs to others stays."""

import json
import os
import subprocess
import sys

import pytest

from grpo_components.cluster.leftovers import make_temp_dir, remove_temp_dir, sweep


@pytest.fixture
def places(tmp_path):
    """Stand-ins for /tmp and /dev/shm."""
    found = tmp_path / "tmp", tmp_path / "shm"
    for folder in found:
        folder.mkdir()
    return found


@pytest.fixture
def dead_pid():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def semaphores(shared_memory, name, count=2):
    paths = [shared_memory / f"sem.{name}-abcdefg{number}" for number in range(count)]
    for path in paths:
        path.touch()
    return paths


def leftovers(places, name):
    """A run's folder with Ray's session in it, and semaphores of its roles."""
    folder = places[0] / name
    (folder / "session_1" / "sockets").mkdir(parents=True)
    (folder / "session_1" / "sockets" / "raylet").touch()
    return [folder, *semaphores(places[1], name)]


def test_memory_of_workers_that_were_killed_at_their_start_is_removed_with_the_folder(places):
    folder = make_temp_dir(places[0])
    (folder / "vllm_dist_a1").touch()  # vLLM's workers meet through it, and name their memory so
    names = ["vllm_dist_a1-tp:0-[0-1]-cpushm_0", "vllm_dist_a1-tp:0-[0-1]-cpushm_1", "vllm_dist_a"]
    for name in names:
        (places[1] / name).touch()
    remove_temp_dir(folder, places[1])
    assert [path.name for path in places[1].iterdir()] == ["vllm_dist_a"]


def there(paths):
    return [path.exists() for path in paths]


@pytest.mark.parametrize("form", ["grpo-{}-ab3_ef7h", "grpo-{}-n{:x}_ab3_ef7h"])
def test_leftovers_of_a_dead_process_are_removed(places, dead_pid, form):
    name = form.format(dead_pid, os.stat("/proc/self/ns/pid").st_ino)
    left = leftovers(places, name)
    assert sweep(*places) == [name]
    assert not any(there(left)) and sweep(*places) == []


def test_semaphores_without_their_folder_are_removed(places, dead_pid):
    left = semaphores(places[1], f"grpo-{dead_pid}-abcdefgh")
    assert sweep(*places) == [f"grpo-{dead_pid}-abcdefgh"] and not any(there(left))


def test_what_a_living_process_uses_stays(places):
    folder = make_temp_dir(places[0])
    own = [folder, *semaphores(places[1], folder.name)]
    older = leftovers(places, f"grpo-{os.getpid()}-abcdefgh")  # of a version without a record
    assert sweep(*places) == [] and all(there([*own, *older]))
    remove_temp_dir(folder, places[1])
    assert not any(there(own)) and all(there(older))


@pytest.mark.parametrize("field", ["start_ticks", "boot"])
def test_a_pid_that_another_process_got_since_does_not_protect_them(places, field):
    folder = make_temp_dir(places[0])
    left = [folder, *semaphores(places[1], folder.name)]
    owner = json.loads((folder / "owner.json").read_text())
    (folder / "owner.json").write_text(json.dumps(owner | {field: 1}))
    assert sweep(*places) == [folder.name] and not any(there(left))


@pytest.mark.parametrize("record", ["", "[1]", "{}", '{"pid": 1}', "\0"])
def test_without_a_valid_record_a_living_pid_protects_them(places, record):
    folder = make_temp_dir(places[0])
    (folder / "owner.json").write_text(record)
    assert sweep(*places) == [] and folder.exists()


def test_files_of_other_users_namespaces_and_programs_stay(places, dead_pid, monkeypatch):
    others = leftovers(places, f"grpo-{dead_pid}-n1f_abcdefgh")  # a container with its own pids
    names = (f"grpo-{dead_pid}", f"grpo-x{dead_pid}-a", f"my-grpo-{dead_pid}-a", "grpo-notes")
    for name in names:
        (places[0] / name).mkdir()
    file, link = places[0] / f"grpo-{dead_pid}-a_file", places[0] / f"grpo-{dead_pid}-a_link"
    file.touch()
    link.symlink_to(places[0] / "grpo-notes")
    foreign = [places[1] / f"sem.mp-{dead_pid}", *others, file, link]
    foreign[0].touch()
    assert sweep(*places) == [] and all(there(foreign))
    left = leftovers(places, f"grpo-{dead_pid}-abcdefgh")
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    assert sweep(*places) == [] and all(there(left))


def test_the_folders_path_leaves_room_for_rays_sockets():
    folder = make_temp_dir()
    try:
        longest = "session_2026-11-22_11-20-36_123456_4194304/sockets/plasma_store"
        room = len("4194304") - len(str(os.getpid()))
        assert len(f"{folder}/{longest}") + room <= 107
    finally:
        remove_temp_dir(folder)
