"""No run overwrites another one: a folder has one holder, and an ended run's is moved aside."""

import errno
import fcntl
import importlib.metadata
import json
import multiprocessing
import os
import signal
import subprocess
from pathlib import Path
from unittest.mock import Mock

import pytest
from lib.files import tree_of, write_text
from omegaconf import OmegaConf

from grpo_components.records.run_folder import (
    LOCK,
    lock_folder,
    new_identity,
    prepare_output_folder,
    real_path,
    refuse_folder_in_use,
    reopen_output_folder,
    save_code,
)
from grpo_components.settings import Settings

CONFIG = {
    **{"output_dir": "/runs/a", "base_model_path": "/models/a"},
    **{"max_staleness": 1, "groups_per_step": 2, "group_size": 2},
}
FORK = multiprocessing.get_context("fork")


def cfg(**changes):
    return Settings.model_construct(**{"seed": 1, **CONFIG, **changes})


def prepare(folder, **changes):
    """Start a run; returns its lock and the new path of an earlier run."""
    return prepare_output_folder(real_path(folder), cfg(**changes), new_identity())


def whole_run(folder, **changes):
    """Start and end a run; returns the new path of an earlier run."""
    lock, moved_to = prepare(folder, **changes)
    (Path(folder) / "receipts.jsonl").write_text('{"event": "start"}\n')
    lock.close()
    return moved_to


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_every_earlier_run_is_kept_under_the_next_free_number(tmp_path):
    runs = tmp_path / "new" / "runs"
    lock, moved_to = prepare(runs / "a", seed=0)
    assert moved_to is None and names_in(runs) == ["a"]
    assert names_in(runs / "a") == ["config.yaml", "logs", LOCK]
    assert OmegaConf.load(runs / "a" / "config.yaml") == cfg(seed=0).model_dump()
    (runs / "a" / "receipts.jsonl").touch()
    lock.close()
    (runs / "a-2").write_text("mine")
    (runs / "a-4").mkdir()
    moved = [whole_run(runs / "a", seed=seed) for seed in (1, 2, 3)]
    assert moved == [runs / f"a-{number}" for number in (1, 3, 5)]
    seeds = {n: OmegaConf.load(runs / n / "config.yaml").seed for n in ("a-1", "a-3", "a-5", "a")}
    assert [*seeds.values()] == [0, 1, 2, 3]
    assert names_in(runs) == sorted([*seeds, "a-2", "a-4"])


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
    assert holds(lock, tmp_path / "a")
    assert names_in(tmp_path) == ["a", "link"]


MINE = {"config.yaml": OmegaConf.to_yaml(cfg().model_dump())}
"""A file to start runs with."""


@pytest.mark.parametrize(
    "content",
    [
        {"thesis.tex": "ten years"},
        {"config.yaml": "seed: 1", "logs/run.log": ""},  # another program's
        MINE,
        MINE | {"logs/mine.log": ""},
        {"receipts.jsonl": '{"event": "start"}'},
        {LOCK: "", "mine": ""},
        {".thesis.tex.swp": ""},
        {"checkpoints/step_1/model.safetensors": ""},
    ],
)
def test_a_folder_with_other_files_is_refused_and_not_touched(tmp_path, content):
    for name, text in content.items():
        write_text(tmp_path / "a" / name, text)
    before = tree_of(tmp_path)
    with pytest.raises(ValueError, match=f"^output_dir: {tmp_path}/a .*; allowed: "):
        prepare(tmp_path / "a")
    assert tree_of(tmp_path) == before


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
    logs = [folder / name for name in ("receipts.jsonl", "logs/metrics.jsonl", "logs/roles.jsonl")]
    for path in logs:
        path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    (folder / "checkpoints").mkdir()
    for attempt in (1, 2):
        reopen_output_folder(folder, cfg(seed=attempt), attempt, new_identity())
    assert {path.read_text() for path in logs} == {'{"step": 1}\n{"step": 2}\n'}
    assert (folder / "checkpoints").is_dir()
    names = ("config_attempt_0.yaml", "config_attempt_1.yaml", "config.yaml")
    assert [OmegaConf.load(folder / name).seed for name in names] == [0, 1, 2]


# ---- the lock -----------------------------------------------------------------------------------


def holds(lock, folder):
    return os.path.samestat(os.fstat(lock.fileno()), (folder / LOCK).stat())


def hold(folder, locked, ends):
    lock = lock_folder(folder)
    locked.set()
    ends.wait()
    assert holds(lock, folder)


@pytest.fixture
def holder(tmp_path):
    """A process that has taken the folder, and keeps it until its event `ends`."""
    locked, ends = FORK.Event(), FORK.Event()
    process = FORK.Process(target=hold, args=(tmp_path, locked, ends), daemon=True)
    process.start()
    assert locked.wait(60)
    yield process, ends
    process.kill()
    process.join()


@pytest.mark.parametrize("end", ["exit", "terminate", "kill"])
def test_the_next_process_gets_the_folder_however_the_last_one_ended(tmp_path, holder, end):
    process, ends = holder
    for check in (lock_folder, refuse_folder_in_use):
        with pytest.raises(ValueError, match=f"is in use by pid {process.pid} on "):
            check(tmp_path)
    if end == "exit":
        ends.set()
        process.join()
    else:  # not waited for: it is a zombie
        os.kill(process.pid, signal.SIGKILL if end == "kill" else signal.SIGTERM)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        refuse_folder_in_use(tmp_path)
    lock_folder(tmp_path).close()


def test_the_lock_is_released_once_and_not_by_a_fork(tmp_path):
    first = lock_folder(tmp_path)
    first.close()
    lock = lock_folder(tmp_path)
    first.close()
    if (pid := os.fork()) == 0:
        lock.close()
        os._exit(0)
    os.waitpid(pid, 0)
    one_line = rf"^output_dir: [^\n]*pid {os.getpid()} on [^\n]+; allowed: [^\n]+\Z"
    with pytest.raises(ValueError, match=one_line):
        lock_folder(tmp_path)
    lock.close()


def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch, caplog):
    unknown = OSError(errno.ENOSYS, "Function not implemented")
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=unknown))
    lock_folder(tmp_path)
    assert "has no file locks" in caplog.text


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
    assert holds(lock_folder(folder), folder)
    assert len(calls) == 2 and folder.is_dir()


# ---- the code that ran --------------------------------------------------------------------------


def git(*arguments):
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    done = subprocess.run(["git", *who, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """A recipe of the user's own in the folder in which they start `tune run`."""
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    Path("my_grpo.py").write_text("LOSS = 1\n")
    return Path("my_grpo.py")


def saved(tmp_path, recipe="my_grpo.py", config=""):
    write_text(tmp_path / "run/config.yaml", config)
    save_code(tmp_path / "run", 0, recipe)
    folder = tmp_path / "run" / "code" / "attempt_0"
    return folder, json.loads((folder / "environment.json").read_text())


def test_it_has_the_recipe_the_commit_and_what_was_changed_since(recipe, tmp_path):
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    recipe.write_text("LOSS = 2\n")
    folder, about = saved(tmp_path)
    assert (folder / "my_grpo.py").read_text() == "LOSS = 2\n"
    assert about["commit"] == git("rev-parse", "HEAD")
    assert "-LOSS = 1\n+LOSS = 2\n" in (folder / "changes.diff").read_text()
    assert about["packages"]["torch"] == importlib.metadata.version("torch")


def test_no_checkout_and_no_recipe_are_no_error_and_a_second_start_replaces_it(recipe, tmp_path):
    folder, _ = saved(tmp_path)
    (folder / "changes.diff").touch()
    folder, about = saved(tmp_path, recipe=None)
    assert about["commit"] is None and about["recipe"] is None
    assert names_in(folder) == ["environment.json"]


def test_it_has_the_own_files_of_components_also_of_nested_ones(recipe, tmp_path):
    for name in ("my_rewards", "my_worlds", "my_notes"):
        Path(f"{name}.py").write_text(name)
    world = {"_component_": "my_worlds.Digit"}
    rewards = {"a": {"_component_": "my_rewards.A"}, "b": {"_component_": "torch.nn.B"}}
    config = {"environment": {"_component_": "grpo_components.C", "world": world}}
    folder, _ = saved(tmp_path, config=OmegaConf.to_yaml(config | {"rewards": rewards}))
    found = sorted(path.name for path in folder.glob("*.py"))
    assert found == ["my_grpo.py", "my_rewards.py", "my_worlds.py"]
