"""The gate names what differs, to the bit on one machine and within a tolerance on another."""

import math

from lib.goldens import TOLERANCE, differences, read_goldens, write_goldens

GOLDEN = {"total": 0.5, "hidden": math.nan, "batch_hash": "a"}


def found(exact=True, **now):
    return list(differences("tiny step 2 loss", GOLDEN, {**GOLDEN, **now}, exact))


def test_one_bit_is_a_difference_and_is_named_by_key_and_step():
    assert found() == []
    (line,) = found(total=math.nextafter(0.5, 1))
    assert line == "  tiny step 2 loss/total: 0.5 -> 0.5000000000000001"
    assert found(batch_hash="b") and found(hidden=0.0) and found(more=1) and found(total=None)


def test_on_another_machine_numbers_may_differ_a_little_and_hashes_are_not_compared():
    assert found(exact=False, total=0.5 * (1 + TOLERANCE / 2), batch_hash="b") == []
    assert found(exact=False, total=0.5 * (1 + TOLERANCE * 2)) and found(exact=False, hidden=0.5)
    assert found(exact=False, more=1)


def test_what_is_missing_is_a_difference():
    assert list(differences("k", ["a", "b"], ["a"], True)) == ["  k/2: 'b' -> '(none)'"]
    assert list(differences("k", "(none)", {"a": 1}, True)) == ["  k: '(none)' -> {'a': 1}"]


def test_goldens_are_read_as_they_were_written(tmp_path):
    values = {
        "machine": {"cpu": "x", "threads": 2},
        "dry_run one a plan": ["x", "y"],
        "dry_run two a plan": ["x", "y"],
        "tiny step 1 loss": {"total": 0.1 + 0.2, "none": None},
    }
    write_goldens(tmp_path / "goldens.txt", values)
    assert read_goldens(tmp_path / "goldens.txt") == values
    assert len((tmp_path / "goldens.txt").read_text().splitlines()) == 3
