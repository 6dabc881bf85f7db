"""No run continues in a folder while a role of a dead driver may still write there."""

import json
import subprocess
import sys
import time

import pytest

from grpo_components.records import leftover_roles
from grpo_components.records.folder_lock import LOCK, lock_folder, read_holder
from grpo_components.records.leftover_roles import wait_for_roles


@pytest.fixture
def role():
    """A process that ends when its input does."""
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        yield process


@pytest.fixture
def died(tmp_path):
    """A driver that held the folder and died."""
    (tmp_path / "logs").mkdir()
    lock = lock_folder(tmp_path)
    record = (tmp_path / LOCK).read_bytes()
    lock.release()
    (tmp_path / LOCK).write_bytes(record)
    return read_holder(tmp_path)


def record(folder, pid, started, torn='{"role": "tra'):
    lines = [{"role": "trainer_0", "pid": pid, "node": "a", "attempt": 0, "started": started}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "logs" / "roles.jsonl").write_text(f"[]\n{text}{torn}")


def test_a_running_role_is_waited_for_and_then_named(tmp_path, monkeypatch, role, died):
    record(tmp_path, role.pid, time.time())
    monkeypatch.setattr(leftover_roles, "WAIT_S", 0.1)
    with pytest.raises(ValueError, match=f"^output_dir: .* trainer_0, pid {role.pid}, "):
        wait_for_roles(tmp_path, died)
    role.kill()  # not waited for: it is a zombie
    wait_for_roles(tmp_path, died)


def test_the_processes_of_a_role_are_waited_for_too(tmp_path, monkeypatch, died):
    """They write to its log; a tensor-parallel worker may take longer to end."""
    code = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import sys; sys.stdin.read()'])\n"
        "print(child.pid, flush=True)\n"
        "child.wait()"
    )
    command = [sys.executable, "-c", code]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as parent:
        child = int(parent.stdout.readline())
        record(tmp_path, parent.pid, time.time())
        wait_procs = leftover_roles.psutil.wait_procs

        def kill_the_role(processes, timeout):
            parent.kill()
            parent.wait()
            return wait_procs(processes, timeout=0.1)

        monkeypatch.setattr(leftover_roles.psutil, "wait_procs", kill_the_role)
        with pytest.raises(ValueError, match=f"a process of trainer_0, pid {child}, "):
            wait_for_roles(tmp_path, died)


def test_a_role_that_ends_during_the_wait_does_not_block_the_folder(
    tmp_path, monkeypatch, role, died
):
    record(tmp_path, role.pid, time.time())
    wait_procs = leftover_roles.psutil.wait_procs

    def end(processes, timeout):
        assert [process.pid for process in processes] == [role.pid]
        role.communicate()
        return wait_procs(processes, timeout)

    monkeypatch.setattr(leftover_roles.psutil, "wait_procs", end)
    wait_for_roles(tmp_path, died)


@pytest.mark.parametrize("seconds", [-3600, 3600])
def test_another_process_with_the_pid_of_a_role_is_ignored(
    tmp_path, monkeypatch, role, died, seconds
):
    """The role is of an earlier driver, or its start time is in the future."""
    monkeypatch.setattr(leftover_roles, "WAIT_S", 0.0)
    record(tmp_path, role.pid, time.time() + seconds)
    wait_for_roles(tmp_path, died)


@pytest.mark.parametrize("pid", [-1, 0, 4194305, 10**30])
def test_an_invalid_pid_is_ignored(tmp_path, monkeypatch, died, pid):
    monkeypatch.setattr(leftover_roles, "WAIT_S", 0.0)
    record(tmp_path, pid, time.time())
    wait_for_roles(tmp_path, died)


def test_without_a_dead_driver_there_is_no_wait(tmp_path):
    wait_for_roles(tmp_path, None)
