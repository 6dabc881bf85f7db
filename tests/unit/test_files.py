"""A file is replaced as a whole, and links that someone put into its folder are not followed."""

import errno
import os
import stat

import pytest

from grpo_components import files
from grpo_components.files import append_record, write_whole


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own"
    path.write_text("mine")
    return path


@pytest.fixture
def target(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run" / "report.html"


def test_a_record_that_the_full_disk_refuses_is_an_error_that_names_the_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")  # every write fails with ENOSPC
    with pytest.raises(OSError) as failed:
        append_record(path, {"step": 1})
    assert (failed.value.errno, failed.value.filename) == (errno.ENOSPC, str(path))


@pytest.mark.parametrize("durable", [False, True])
def test_it_replaces_the_old_file_and_leaves_no_other(target, durable):
    target.write_text("before")
    write_whole(target, "äfter", durable=durable)
    assert target.read_bytes() == "äfter".encode()
    assert [path.name for path in target.parent.iterdir()] == ["report.html"]
    os.umask(mask := os.umask(0))
    assert stat.S_IMODE(target.stat().st_mode) == 0o666 & ~mask


def test_a_link_in_the_targets_place_is_replaced_and_not_followed(target, own):
    for link in (target, target.with_name(".report.html.part")):
        link.symlink_to(own)
    write_whole(target, "page")
    assert own.read_text() == "mine" and not target.is_symlink()
    assert target.read_text() == "page"


@pytest.mark.parametrize("failure", ["write", "replace"])
def test_a_failure_keeps_the_old_file(target, monkeypatch, failure):
    target.write_text("before")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync" if failure == "write" else "replace", full)
    with pytest.raises(OSError):
        write_whole(target, "after", durable=True)
    assert target.read_text() == "before"
    assert [path.name for path in target.parent.iterdir()] == ["report.html"]
