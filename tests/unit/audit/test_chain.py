"""The chain detects removed, moved and added records."""

import json

import pytest

from grpo_components.records.receipt_chain import END_FILE
from grpo_tools.audit.__main__ import audit, main


@pytest.fixture
def run(tmp_path, write_run):
    write_run(tmp_path / "receipts.jsonl")
    return tmp_path


def broken(run, unfinished=False):
    return audit(run / "receipts.jsonl", unfinished)[0].broken


def rewrite(run, change):
    path = run / "receipts.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    change(lines)
    path.write_bytes(b"".join(lines))


def test_each_changed_removed_repeated_or_moved_line_is_detected(run):
    whole = (run / "receipts.jsonl").read_bytes()
    for number in range(len(whole.splitlines())):
        for change in (
            lambda lines, n=number: lines.pop(n),
            lambda lines, n=number: lines.insert(n, lines.pop(n).replace(b"0", b"1", 1)),
            lambda lines, n=number: lines.insert(n, lines[n]),
            lambda lines, n=number: lines.insert(n - 1, lines.pop(n)),
        ):
            rewrite(run, change)
            if (run / "receipts.jsonl").read_bytes() != whole:
                for unfinished in (False, True):
                    found = broken(run, unfinished)
                    assert "chain" in found and "receipts." in found["chain"], number
            (run / "receipts.jsonl").write_bytes(whole)
    assert not broken(run)


@pytest.mark.parametrize("lost", [1, 2, 5])
def test_a_removed_tail_is_not_taken_for_a_killed_run(run, lost):
    rewrite(run, lambda lines: lines.__delitem__(slice(-lost, None)))
    assert list(broken(run, unfinished=True))[:1] == ["chain"]
    assert END_FILE in broken(run, unfinished=True)["chain"]


def test_a_missing_last_line_end_is_detected(run):
    rewrite(run, lambda lines: lines.append(lines.pop()[:-1]))
    assert "chain" in broken(run, unfinished=True)
    assert list(broken(run)) == ["parses"]


@pytest.mark.parametrize("content", [None, b"x", b'{"records": 8, "chain": "9999"}'])
def test_a_missing_or_damaged_end_file_is_detected(run, content, capsys):
    (run / END_FILE).unlink()
    if content is not None:
        (run / END_FILE).write_bytes(content)
    assert main([str(run)]) == 1
    out = capsys.readouterr().out
    assert "\nbroken: chain " in out and END_FILE in out.splitlines()[-1]


def test_a_killed_run_may_have_one_more_record_and_a_running_one_any_number(run):
    """A kill may fall between the two writes; a running run writes while it is read."""
    end = (run / END_FILE).read_text()
    kept = {}
    records = [json.loads(line) for line in (run / "receipts.jsonl").open()]
    for record in records:
        kept[record["chain"]] = len(kept) + 1
    for chain, number in kept.items():
        last = records[-1]["chain"]
        (run / END_FILE).write_text(end.replace(f"{len(kept)},", f"{number},").replace(last, chain))
        assert ("chain" in broken(run)) == (number < len(kept) - 1)
        assert "chain" not in broken(run, unfinished=True)
