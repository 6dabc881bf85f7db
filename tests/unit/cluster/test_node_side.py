"""A node's part of a run's files: what is brought, compared and removed."""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lib.properties import many

from grpo_components.cluster import node_side
from grpo_components.cluster.node_side import (
    clear,
    describe,
    end_processes,
    fingerprint,
    new_bytes,
    open_run_folder,
    remove_files,
    write_files,
)


@settings(max_examples=many(30))
@given(st.lists(st.tuples(st.sampled_from(["logs/a.log", "b", "c/d/e"]), st.binary(max_size=40))))
def test_files_that_grow_arrive_byte_by_byte(tmp_path_factory, additions):
    node = tmp_path_factory.mktemp("node")
    driver, seen = tmp_path_factory.mktemp("driver"), {}
    assert not open_run_folder(str(node), ".marker", "run")
    for name, content in additions:
        (node / name).parent.mkdir(parents=True, exist_ok=True)
        with (node / name).open("ab") as file:
            file.write(content)
        new = new_bytes(str(node), seen)
        write_files(str(driver), new)
        seen |= {path: offset + len(part) for path, offset, part in new}
        assert new_bytes(str(node), seen) == []
    for name in {name for name, _ in additions}:
        assert (driver / name).read_bytes() == (node / name).read_bytes()


def test_large_files_come_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(node_side, "_MAX_READ", 10)
    open_run_folder(str(tmp_path / "node"), ".marker", "run")
    (tmp_path / "node" / "weights").write_bytes(bytes(range(25)))
    seen, parts = {}, 0
    while new := new_bytes(str(tmp_path / "node"), seen):
        write_files(str(tmp_path / "driver"), new)
        seen |= {path: offset + len(part) for path, offset, part in new}
        parts += 1
    assert parts == 3
    assert (tmp_path / "driver" / "weights").read_bytes() == bytes(range(25))


def test_checkpoints_are_left_out_or_brought_alone(tmp_path):
    open_run_folder(str(tmp_path), ".marker", "run")
    for name in ("checkpoints/step_1/a", "logs/x.log"):
        write_files(str(tmp_path), [(name, 0, b"1")])

    def names(**which):
        return [name for name, _, _ in new_bytes(str(tmp_path), {}, **which)]

    assert names(without="checkpoints") == ["logs/x.log"]
    assert names(below="checkpoints/step_1/") == ["checkpoints/step_1/a"]
    remove_files(str(tmp_path), "checkpoints/step_1")
    assert names() == ["logs/x.log"]


def test_a_shared_folder_and_one_of_another_kind_are_never_touched(tmp_path):
    shared, other = tmp_path / "shared", tmp_path / "other"
    for folder in (shared, other):
        folder.mkdir()
        (folder / "mine").write_text("x")
    (shared / ".marker").touch()
    assert open_run_folder(str(shared), ".marker", "run")
    names = ("shared", "other", "no")
    facts = {name: describe(str(tmp_path / name), ".marker", {}, False) for name in names}
    assert [facts[name]["shares"] for name in facts] == [True, False, False]
    assert [facts[name]["other"] for name in facts] == [False, True, False]
    for folder in (shared, other):
        assert new_bytes(str(folder), {}) == []
        remove_files(str(folder), "")
        clear(str(folder), str(tmp_path / "nothing"))
        assert (folder / "mine").exists()


def test_the_part_of_a_killed_run_is_replaced(tmp_path):
    open_run_folder(str(tmp_path / "run"), ".marker", "first")
    (tmp_path / "run" / "logs" / "old.log").write_text("old")
    open_run_folder(str(tmp_path / "run"), ".marker", "first")
    assert (tmp_path / "run" / "logs" / "old.log").exists()
    open_run_folder(str(tmp_path / "run"), ".marker", "second")
    assert not (tmp_path / "run" / "logs" / "old.log").exists()
    clear(str(tmp_path / "run"), str(tmp_path / "nothing"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("change", ["size", "start", "end", "name", "missing"])
def test_a_fingerprint_sees_other_weights(tmp_path, change):
    def model(folder):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(bytes(5 * 2**20))
        return folder

    one, other = model(tmp_path / "one"), model(tmp_path / "other")
    assert fingerprint(one) == fingerprint(other) is not None
    weights = other / "model.safetensors"
    with weights.open("r+b") as file:
        if change in ("start", "end"):
            file.seek({"start": 7, "end": -7}[change], os.SEEK_END if change == "end" else 0)
            file.write(b"x")
        elif change == "size":
            file.truncate(5 * 2**20 - 1)
    if change == "name":
        weights.rename(other / "renamed.safetensors")
    if change == "missing":
        weights.unlink()
    assert fingerprint(other) != fingerprint(one)
    assert fingerprint(tmp_path / "nowhere") is None


def test_all_processes_of_a_run_are_ended_and_no_others(monkeypatch):
    monkeypatch.setattr(node_side, "_END_S", 0.5)
    code = "import time; print(1, flush=True); time.sleep(60)"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, node_side.RUN_VARIABLE: run},
            stdout=subprocess.PIPE,
        )
        for run in ("one", "other")
    ]
    for process in started:
        process.stdout.readline()
    assert end_processes("one") == [started[0].pid]
    assert not psutil.pid_exists(started[0].pid) and started[1].poll() is None
    started[1].kill()
    started[1].wait(10)


def test_a_scratch_folder_is_swept_once_nobody_holds_it(tmp_path, monkeypatch):
    folder = tmp_path / "grpo-job-1"
    monkeypatch.setattr(node_side, "SCRATCH_PREFIX", str(folder).removeprefix("/tmp/"))
    folder.mkdir()
    held = (folder / "lock").open("w")
    fcntl.flock(held, fcntl.LOCK_SH)
    node_side._remove_dead_scratch()
    assert folder.exists()
    held.close()
    node_side._remove_dead_scratch()
    assert not folder.exists()


def test_a_scratch_folder_that_is_swept_while_it_is_locked_is_made_again(tmp_path, monkeypatch):
    folder, swept, flock = tmp_path / "grpo-job-1", [], fcntl.flock

    def swept_once_before(descriptor, operation):
        if not swept:
            swept.append(folder)
            shutil.rmtree(folder)
        flock(descriptor, operation)

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(fcntl, "flock", swept_once_before)
    node_side.open_scratch(folder, str(tmp_path))
    assert swept and tempfile.gettempdir() == str(folder)
    with (folder / "lock").open() as lock, pytest.raises(BlockingIOError):
        flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
