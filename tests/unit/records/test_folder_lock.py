"""A folder has at most one running holder; a dead one never blocks it, even with a reused pid."""

import errno
import fcntl
import gc
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from grpo_components.records import folder_lock
from grpo_components.records.folder_lock import (
    LOCK,
    SILENT_S,
    lock_folder,
    read_holder,
    refuse_folder_in_use,
)

TAKE = """
import sys
from pathlib import Path
from grpo_components.records.folder_lock import lock_folder
lock = lock_folder(Path(sys.argv[1]))
sys.stdout.write("locked\\n")
sys.stdout.flush()
sys.stdin.read()
"""


@pytest.fixture
def start():
    """Start a process that takes a folder and keeps it until its input ends."""
    processes = []

    def holder(folder):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        process = subprocess.Popen([sys.executable, "-c", TAKE, str(folder)], **pipes)
        processes.append(process)
        assert process.stdout.readline() == "locked\n"
        return process

    yield holder
    for process in processes:
        process.kill()
        process.communicate()


def refusal(folder):
    with pytest.raises(ValueError) as refused:
        lock_folder(folder)
    assert re.fullmatch(r"output_dir: [^\n]+; allowed: [^\n]+", str(refused.value))
    return str(refused.value)


def write_holder(folder, age_s=0.0, **changes):
    """Leave the lock of another process."""
    (folder / LOCK).unlink(missing_ok=True)
    lock = lock_folder(folder)
    record = json.loads((folder / LOCK).read_text()) | changes
    lock.release()
    (folder / LOCK).write_text(json.dumps(record).ljust(1024))
    then = time.time() - age_s
    os.utime(folder / LOCK, (then, then))
    return record


@pytest.fixture
def no_locks(monkeypatch):
    """A file system without flock."""

    def flock(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)


def test_a_folder_in_use_is_refused_with_pid_host_and_start_of_the_holder(tmp_path, start):
    process = start(tmp_path / "run")
    holder = read_holder(tmp_path / "run")
    assert holder is not None and holder.pid == process.pid
    for check in (lock_folder, refuse_folder_in_use):
        with pytest.raises(ValueError) as refused:
            check(tmp_path / "run")
        in_use = f"in use by pid {process.pid} on {holder.host}, started {holder.started}; "
        assert in_use in str(refused.value)
    assert read_holder(tmp_path / "run") == holder


@pytest.mark.parametrize("end", ["exit", "terminate", "kill"])
def test_the_next_process_gets_the_folder_however_the_last_one_ended(tmp_path, start, end):
    process = start(tmp_path)
    if end == "exit":
        process.communicate()
        assert not (tmp_path / LOCK).exists()
    else:  # not waited for: it is a zombie
        process.send_signal(signal.SIGKILL if end == "kill" else signal.SIGTERM)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        refuse_folder_in_use(tmp_path)
    lock = lock_folder(tmp_path)
    assert read_holder(tmp_path).pid == os.getpid()
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_a_stopped_process_still_has_its_folder(tmp_path, start):
    process = start(tmp_path)
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    os.utime(tmp_path / LOCK, (0, 0))  # it no longer updates the file
    assert f"pid {process.pid} on " in refusal(tmp_path)


def test_the_lock_ends_with_its_object_and_is_released_once(tmp_path):
    lock = lock_folder(tmp_path)
    assert f"pid {os.getpid()} on " in refusal(tmp_path)
    lock.release()
    again = lock_folder(tmp_path)
    lock.release()
    assert f"pid {os.getpid()} on " in refusal(tmp_path)
    del again
    gc.collect()
    lock_folder(tmp_path).release()
    assert not any(str(tmp_path) in thread.name for thread in threading.enumerate())


def test_a_fork_does_not_release_the_lock_of_its_parent(tmp_path):
    lock = lock_folder(tmp_path)
    if (pid := os.fork()) == 0:
        lock.release()
        os._exit(0)
    os.waitpid(pid, 0)
    assert f"pid {os.getpid()} on " in refusal(tmp_path)


def test_a_reused_pid_does_not_block_the_folder(tmp_path, no_locks):
    ours = write_holder(tmp_path)
    assert f"pid {os.getpid()} on " in refusal(tmp_path)
    write_holder(tmp_path, start_ticks=ours["start_ticks"] - 1)
    refuse_folder_in_use(tmp_path)
    lock = lock_folder(tmp_path)
    assert not lock.atomic
    assert read_holder(tmp_path).start_ticks == ours["start_ticks"]


@pytest.mark.parametrize("elsewhere", [{"boot": "another"}, {"pid_namespace": "another"}])
def test_another_host_has_the_folder_while_it_updates_the_file(tmp_path, no_locks, elsewhere):
    write_holder(tmp_path, age_s=SILENT_S / 2, host="far", pid=7, **elsewhere)
    assert "in use by pid 7 on far, started 2" in refusal(tmp_path)
    write_holder(tmp_path, age_s=2 * SILENT_S, host="far", **elsewhere)
    lock_folder(tmp_path)


def test_a_free_lock_of_this_machine_is_stale_at_any_age(tmp_path):
    """The kernel knows all its locks; the file may be of a killed container."""
    write_holder(tmp_path, pid_namespace="another", host="container")
    lock_folder(tmp_path).release()
    write_holder(tmp_path, boot="another", host="far")  # it does not know those of another kernel
    assert " on far, started " in refusal(tmp_path)


def test_the_file_is_updated_until_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_lock, "HEARTBEAT_S", 0.001)
    lock = lock_folder(tmp_path)
    for _ in range(3):
        os.utime(tmp_path / LOCK, (0, 0))
        while (tmp_path / LOCK).stat().st_mtime < 1:
            assert lock.release.alive
    lock.release()


@pytest.mark.parametrize("content", [b"", b"\0" * 1024])
def test_an_empty_lock_file_does_not_block_the_folder(tmp_path, content):
    (tmp_path / LOCK).write_bytes(content)
    lock_folder(tmp_path)


@pytest.mark.parametrize("content", ["mine", "{}", '{"pid": 1}', "[" * 900, "[1]", "x" * 5000])
def test_a_file_with_that_name_that_no_run_wrote_is_not_touched(tmp_path, content):
    (tmp_path / LOCK).write_text(content)
    assert LOCK in refusal(tmp_path)
    assert (tmp_path / LOCK).read_text() == content


def test_a_link_or_folder_with_that_name_is_refused(tmp_path):
    (tmp_path / "mine").write_text("")
    (tmp_path / LOCK).symlink_to(tmp_path / "mine")
    refusal(tmp_path)
    assert (tmp_path / "mine").read_text() == ""
    (tmp_path / LOCK).unlink()
    (tmp_path / LOCK).mkdir()
    refusal(tmp_path)


@pytest.mark.parametrize("how", ["moved", "removed", "replaced"])
def test_verify_notices_a_folder_that_is_no_longer_the_runs(tmp_path, how):
    folder = tmp_path / "run"
    lock = lock_folder(folder)
    lock.verify()
    (folder / LOCK).unlink() if how == "removed" else folder.rename(tmp_path / "moved")
    other = lock_folder(folder) if how == "replaced" else None
    with pytest.raises(OSError) as lost:
        lock.verify()
    assert (lost.value.errno, lost.value.filename) == (errno.ESTALE, str(folder))
    lock.release()
    assert other is None or read_holder(folder), "it releases its own alone"


def test_a_folder_that_was_moved_before_it_was_locked_is_opened_again(tmp_path, monkeypatch):
    """A process that moves a folder has locked it; the next one must lock the new folder."""
    folder: Path = tmp_path / "run"
    flock, calls = fcntl.flock, []

    def moved_meanwhile(descriptor, how):
        if not calls:
            folder.rename(tmp_path / "moved")
        calls.append(how)
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", moved_meanwhile)
    lock = lock_folder(folder)
    lock.verify()
    assert len(calls) == 2 and folder.is_dir()
