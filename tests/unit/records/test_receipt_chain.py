"""The chain continues after any end of its writer, and never hides lost records."""

from unittest import mock

import pytest
from lib.rows import read_rows

from grpo_components.records.receipt_chain import END_FILE, ChainedFile, link, read_end, split


def write(path, *values):
    file = ChainedFile(path)
    for value in values:
        file.append({"value": value})
    file.close()


def is_chained(path):
    chain = ""
    for line in path.read_bytes().splitlines():
        fields, stated = split(line)
        if stated != link(chain, fields):
            return False
        chain = stated
    return True


@pytest.fixture
def path(tmp_path):
    write(tmp_path / "receipts.jsonl", 1, "two", {"three": 3.5})
    return tmp_path / "receipts.jsonl"


def test_the_next_process_continues_the_chain_and_cuts_an_incomplete_line(path):
    with path.open("a") as file:
        file.write('{"value": 4, "cha')
    write(path, 5)
    assert is_chained(path) and read_rows(path)[-1]["value"] == 5
    assert read_end(path).records == 4


def test_the_chain_continues_after_a_kill_between_record_and_end_file(path):
    killed = mock.patch.object(ChainedFile, "_write_end", side_effect=KeyboardInterrupt)
    with killed, pytest.raises(KeyboardInterrupt):
        write(path, 4)
    assert (len(read_rows(path)), read_end(path).records) == (4, 3)
    write(path, 5)
    assert is_chained(path) and read_end(path).records == 5


@pytest.mark.parametrize("end", [b"", b"damaged", None])
def test_without_a_readable_end_file_the_chain_continues_from_the_last_record(path, end):
    path.with_name(END_FILE).unlink()
    if end is not None:
        path.with_name(END_FILE).write_bytes(end)
    write(path, 4)
    assert is_chained(path) and read_end(path).records == 4


def test_lost_records_leave_a_gap_that_no_later_record_closes(path):
    *kept, _ = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(kept))
    write(path, 4)
    write(path, 5)
    assert not is_chained(path)
