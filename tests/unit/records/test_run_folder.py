"""No run overwrites another one: a folder has one holder, and an ended run's is moved aside."""

import errno
import fcntl
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lib.properties import many
from omegaconf import OmegaConf

from grpo_components.files import append_line
from grpo_components.records.run_folder import (
    LOCK,
    lock_folder,
    new_identity,
    prepare_output_folder,
    real_path,
    refuse_folder_in_use,
    reopen_output_folder,
)
from grpo_components.settings import Settings

CONFIG = {
    "output_dir": "/runs/a",
    "base_model_path": "/models/a",
    "max_staleness": 1,
    "groups_per_step": 2,
    "group_size": 2,
}
FORK = multiprocessing.get_context("fork")


def cfg(**changes):
    return Settings.model_construct(**{"seed": 1, **CONFIG, **changes})


def prepare(folder, **changes):
    """Start a run; returns its lock and the new path of an earlier run."""
    lock, moved_to = prepare_output_folder(real_path(folder), cfg(**changes), new_identity())
    return lock, moved_to


def whole_run(folder, **changes):
    """Start and end a run; returns the new path of an earlier run."""
    lock, moved_to = prepare(folder, **changes)
    (Path(folder) / "receipts.jsonl").write_text('{"event": "start"}\n')
    lock.release()
    return moved_to


@pytest.mark.parametrize("exists", [False, True])
def test_a_fresh_folder_is_made_with_its_parents_and_nothing_is_moved(tmp_path, exists):
    folder = tmp_path / "runs" / "a"
    if exists:
        folder.mkdir(parents=True)
    lock, moved_to = prepare(folder)
    assert moved_to is None
    assert sorted(p.name for p in folder.iterdir()) == ["config.yaml", "logs", LOCK]
    assert [p.name for p in folder.parent.iterdir()] == ["a"]
    lock.release()


def test_the_config_is_written_resolved(tmp_path):
    whole_run(tmp_path / "a")
    written = OmegaConf.load(tmp_path / "a" / "config.yaml")
    assert written == {**cfg().model_dump(), "seed": 1, **CONFIG}


def test_every_earlier_run_is_kept_under_the_next_free_number(tmp_path):
    moved = [whole_run(tmp_path / "a", seed=seed) for seed in range(4)]
    assert moved == [None, *(tmp_path / f"a-{number}" for number in (1, 2, 3))]
    seeds = {p.name: OmegaConf.load(p / "config.yaml").seed for p in tmp_path.iterdir()}
    assert seeds == {"a-1": 0, "a-2": 1, "a-3": 2, "a": 3}


@settings(max_examples=many(20))
@given(taken=st.sets(st.integers(1, 5)), as_file=st.booleans())
def test_a_taken_name_is_never_used(tmp_path_factory, taken, as_file):
    parent: Path = tmp_path_factory.mktemp("runs")
    for number in taken:
        other = parent / f"a-{number}"
        other.write_text("mine") if as_file else other.mkdir()
    before = {p.name for p in parent.iterdir()}
    whole_run(parent / "a")
    moved = whole_run(parent / "a")
    assert moved is not None and moved.name not in before
    assert moved.name == f"a-{min(set(range(1, 7)) - taken)}"


def test_the_target_of_a_link_is_moved_and_the_link_leads_to_the_new_run(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "a")
    for seed in (0, 1):
        moved = whole_run(tmp_path / "link", seed=seed)
    assert moved == tmp_path / "a-1"
    assert OmegaConf.load(tmp_path / "link" / "config.yaml").seed == 1


@pytest.mark.parametrize("spelling", ["{0}", "{0}/", "{0}/../a", "link", "{0}/./logs/..", "a"])
def test_a_running_run_keeps_its_folder_however_the_path_is_spelled(
    tmp_path, monkeypatch, spelling
):
    lock, _ = prepare(tmp_path / "a")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"^output_dir: .* pid {os.getpid()} on "):
        prepare(spelling.format(tmp_path / "a"))
    lock.verify()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "link"]


def race(folder, gate, results, done):
    """One of several processes that start a run at the same moment."""
    gate.wait()
    try:
        _, moved_to = prepare(folder)
    except ValueError as error:
        results.put((os.getpid(), str(error)))
    else:
        results.put((os.getpid(), moved_to))
    done.wait()


@pytest.mark.parametrize("before", ["nothing", "a run"])
def test_one_of_several_runs_that_start_together_gets_the_folder(tmp_path, before):
    if before != "nothing":
        whole_run(tmp_path / "a")
    number, results = 5, FORK.Queue()
    gate, done = FORK.Barrier(number), FORK.Event()
    processes = [
        FORK.Process(target=race, args=(tmp_path / "a", gate, results, done), daemon=True)
        for _ in range(number)
    ]
    for process in processes:
        process.start()
    outcomes = [results.get(timeout=60) for _ in processes]
    winners = [pid for pid, outcome in outcomes if not isinstance(outcome, str)]
    holder = (tmp_path / "a" / LOCK).read_text()
    done.set()
    for process in processes:
        process.join()
    assert len(winners) == 1, outcomes
    assert holder.startswith(f"pid {winners[0]} on ")
    refusals = [outcome for _, outcome in outcomes if isinstance(outcome, str)]
    assert all(refusal.startswith("output_dir: ") for refusal in refusals), outcomes
    moved = {p.name for p in tmp_path.iterdir()}
    assert moved == ({"a"} if before == "nothing" else {"a", "a-1"})


@pytest.mark.parametrize(
    "content",
    [
        {"thesis.tex": "ten years"},
        {"config.yaml": "seed: 1", "logs/run.log": ""},  # another program's
        {"config.yaml": OmegaConf.to_yaml(cfg().model_dump())},  # mine, to start runs with
        {"config.yaml": OmegaConf.to_yaml(cfg().model_dump()), "logs/mine.log": ""},
        {"receipts.jsonl": '{"event": "start"}'},
        {LOCK: "", "mine": ""},
        {".thesis.tex.swp": ""},
        {"checkpoints/step_1/model.safetensors": ""},
    ],
)
def test_a_folder_with_other_files_is_refused_and_not_touched(tmp_path, content):
    for name, text in content.items():
        (tmp_path / "a" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "a" / name).write_text(text)
    before = {p: p.read_bytes() if p.is_file() else None for p in tmp_path.rglob("*")}
    with pytest.raises(ValueError, match=f"^output_dir: {tmp_path}/a .*; allowed: "):
        prepare(tmp_path / "a")
    assert {p: p.read_bytes() if p.is_file() else None for p in tmp_path.rglob("*")} == before


def test_files_of_nobody_do_not_count(tmp_path):
    (tmp_path / "a" / "lost+found").mkdir(parents=True)
    (tmp_path / "a" / ".gitkeep").touch()
    assert whole_run(tmp_path / "a") is None
    assert whole_run(tmp_path / "a") == tmp_path / "a-1"


def test_a_folder_that_cannot_be_moved_is_refused(tmp_path, monkeypatch):
    whole_run(tmp_path / "a")

    def rename(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(ValueError, match=r"^output_dir: .*: Permission denied; allowed: "):
        prepare(tmp_path / "a")
    monkeypatch.undo()
    assert whole_run(tmp_path / "a") == tmp_path / "a-1"


def test_a_reopened_folder_loses_only_an_incomplete_line(tmp_path):
    folder = tmp_path / "a"
    whole_run(folder, seed=0)
    for name in ("receipts.jsonl", "logs/metrics.jsonl", "logs/roles.jsonl"):
        (folder / name).write_text('{"step": 1}\n{"step": 2}\n{"st')
    (folder / "checkpoints").mkdir()
    for attempt in (1, 2):
        reopen_output_folder(folder, cfg(seed=attempt), attempt, new_identity())
    for name in ("receipts.jsonl", "logs/metrics.jsonl", "logs/roles.jsonl"):
        assert (folder / name).read_text() == '{"step": 1}\n{"step": 2}\n'
    assert (folder / "checkpoints").is_dir()
    names = ("config_attempt_0.yaml", "config_attempt_1.yaml", "config.yaml")
    assert [OmegaConf.load(folder / name).seed for name in names] == [0, 1, 2]


def test_a_full_disk_is_an_error_that_names_the_file_and_closes_it(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")  # every write fails with ENOSPC
    with path.open("a") as file:
        with pytest.raises(OSError) as failed:
            append_line(file, "a record")
        assert (failed.value.errno, failed.value.filename) == (errno.ENOSPC, str(path))
        assert file.closed, "what is left of the line is not tried again"


# ---- the lock -----------------------------------------------------------------------------------

TAKE = """
import sys
from pathlib import Path
from grpo_components.records.run_folder import lock_folder
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


def test_a_folder_in_use_is_refused_with_pid_and_host_of_the_holder(tmp_path, start):
    process = start(tmp_path / "run")
    for check in (lock_folder, refuse_folder_in_use):
        with pytest.raises(ValueError, match=f"is in use by pid {process.pid} on "):
            check(tmp_path / "run")


@pytest.mark.parametrize("end", ["exit", "terminate", "kill"])
def test_the_next_process_gets_the_folder_however_the_last_one_ended(tmp_path, start, end):
    process = start(tmp_path)
    if end == "exit":
        process.communicate()
    else:  # not waited for: it is a zombie
        process.send_signal(signal.SIGKILL if end == "kill" else signal.SIGTERM)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        refuse_folder_in_use(tmp_path)
    lock_folder(tmp_path).release()


def test_the_lock_is_released_once(tmp_path):
    lock = lock_folder(tmp_path)
    assert f"pid {os.getpid()} on " in refusal(tmp_path)
    lock.release()
    again = lock_folder(tmp_path)
    lock.release()
    assert f"pid {os.getpid()} on " in refusal(tmp_path)
    again.release()


def test_a_fork_does_not_release_the_lock_of_its_parent(tmp_path):
    lock = lock_folder(tmp_path)
    if (pid := os.fork()) == 0:
        lock.release()
        os._exit(0)
    os.waitpid(pid, 0)
    assert f"pid {os.getpid()} on " in refusal(tmp_path)


def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    assert not lock_folder(tmp_path).atomic


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
    if other is not None:  # it releases its own alone
        refusal(folder)


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
