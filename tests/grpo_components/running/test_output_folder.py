"""No run overwrites another: a used folder is moved aside whole."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from grpo_components.running.output_folder import (
    append_line,
    prepare_output_folder,
    reopen_output_folder,
)


def cfg(**changes):
    return OmegaConf.create({"seed": 1, "base": "/models/a", "path": "${base}/x.json", **changes})


@pytest.mark.parametrize("exists", [False, True])
def test_a_fresh_folder_is_made_with_its_parents_and_nothing_is_moved(tmp_path, exists):
    folder = tmp_path / "runs" / "a"
    if exists:
        folder.mkdir(parents=True)
    assert prepare_output_folder(str(folder), cfg()) is None
    assert sorted(p.name for p in folder.iterdir()) == ["config.yaml", "logs"]
    assert [p.name for p in folder.parent.iterdir()] == ["a"]


def test_the_config_is_written_as_it_was_resolved(tmp_path):
    prepare_output_folder(str(tmp_path / "a"), cfg())
    written = OmegaConf.load(tmp_path / "a" / "config.yaml")
    assert written == {"seed": 1, "base": "/models/a", "path": "/models/a/x.json"}
    assert "${" not in (tmp_path / "a" / "config.yaml").read_text()


def test_every_earlier_run_is_kept_under_the_next_free_number(tmp_path):
    folder = str(tmp_path / "a")
    moved = [prepare_output_folder(folder, cfg(seed=seed)) for seed in range(4)]
    assert moved == [None, *(tmp_path / f"a-{number}" for number in (1, 2, 3))]
    seeds = {p.name: OmegaConf.load(p / "config.yaml").seed for p in tmp_path.iterdir()}
    assert seeds == {"a-1": 0, "a-2": 1, "a-3": 2, "a": 3}


def test_whatever_lay_in_the_folder_is_moved_with_it(tmp_path):
    deep = tmp_path / "a" / "checkpoints" / "step_1"
    deep.mkdir(parents=True)
    (deep / "model.safetensors").write_bytes(b"weights")
    moved = prepare_output_folder(str(tmp_path / "a"), cfg())
    assert moved is not None
    kept = moved / "checkpoints" / "step_1" / "model.safetensors"
    assert kept.read_bytes() == b"weights"
    assert not (tmp_path / "a" / "checkpoints").exists()


@given(taken=st.sets(st.integers(1, 5)), as_file=st.booleans())
def test_no_name_that_is_taken_is_used(tmp_path_factory, taken, as_file):
    parent: Path = tmp_path_factory.mktemp("runs")
    for number in taken:
        other = parent / f"a-{number}"
        other.write_text("mine") if as_file else other.mkdir()
    before = {p.name for p in parent.iterdir()}
    prepare_output_folder(str(parent / "a"), cfg())
    moved = prepare_output_folder(str(parent / "a"), cfg())
    assert moved is not None and moved.name not in before
    assert moved.name == f"a-{min(set(range(1, 7)) - taken)}"


def test_a_slash_at_the_end_changes_nothing(tmp_path):
    prepare_output_folder(f"{tmp_path}/a/", cfg())
    assert prepare_output_folder(f"{tmp_path}/a/", cfg()) == tmp_path / "a-1"


def test_a_reopened_folder_keeps_everything_but_a_torn_line(tmp_path):
    folder = tmp_path / "a"
    prepare_output_folder(str(folder), cfg(seed=0))
    for name in ("receipts.jsonl", "logs/metrics.jsonl", "logs/roles.jsonl"):
        (folder / name).write_text('{"step": 1}\n{"step": 2}\n{"st')
    (folder / "checkpoints").mkdir()
    for attempt in (1, 2):
        reopen_output_folder(folder, cfg(seed=attempt), attempt)
    for name in ("receipts.jsonl", "logs/metrics.jsonl", "logs/roles.jsonl"):
        assert (folder / name).read_text() == '{"step": 1}\n{"step": 2}\n'
    assert (folder / "checkpoints").is_dir()
    names = ("config_attempt_0.yaml", "config_attempt_1.yaml", "config.yaml")
    assert [OmegaConf.load(folder / name).seed for name in names] == [0, 1, 2]


def test_a_full_disk_names_the_file_once_and_for_all(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")  # every write to it finds the disk full
    with path.open("a") as file:
        with pytest.raises(OSError, match=r"cannot be written: No space left.*metrics\.jsonl"):
            append_line(file, "a record")
        assert file.closed, "what is left of the line is not tried again"
